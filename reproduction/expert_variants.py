"""The variants that tools.compare_experts trains; they are data, expert_variants.json.

'experts' and 'routers' are variants of mt.M4Experts. A token's feed-forward layers cost 4 M H multiplications and
additions in each, H = 256 altogether: two experts of 128, one of 256, or sixteen of 16. 'recipes' are variants of
mt.M4Demo: each changes one thing of its recipe. 'balance' are variants of lm.MoEDemo in rows of half the length, on the
target sides of the pairs: 8 experts balanced by a loss, by a bias, or not at all, with three seeds each, for equal CPU
seconds. A decoder cannot look at later tokens, as experts that choose do: there 'expert_choice' has another router.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUPS = ("experts", "routers", "recipes", "balance")
# Those of 'balance' end long before, after 100 seconds of CPU.
STEPS = {"experts": 1000, "routers": 300, "recipes": 600, "balance": 10_000}


@dataclass(frozen=True)
class Variant:
    """One model of the comparison."""

    # 'experts' (more and more of them), 'routers' (at 16 experts), 'recipes' or 'balance', or several, space-separated.
    group: str
    experts: int  # E; 1 for the dense model
    says: str  # a short description
    override: str = ""  # the text of --model_params_override
    model: str = "mt.M4Experts"  # the experiment that it is a variant of

    @property
    def steps(self) -> int:
        """The training steps, by default; the most of its groups."""
        return max(STEPS[group] for group in self.group.split())


_DATA: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
VARIANTS = {name: Variant(**variant) for name, variant in _DATA.items()}
