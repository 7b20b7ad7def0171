"""Names the plans of the page on reproduction and of each of its figures; requests.json has what they ask for.

A name is also that of the recorded plan, docs/plans/<name>.json. A plan that several figures show is
made once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORES = {128: "v3:8x8", 512: "v3:16x16", 2048: "v3:32x32"}  # by experts, one on each core
LAYERS = (12, 36, 60)
GENERATIONS = ("v4", "v5p")
CARDS = ("h100", "a100")
# Rows of 128 tokens on a core that make the 2048 tokens of weak scaling.
ROWS_A_CORE = 16
DENSE = "T96L"


@dataclass(frozen=True)
class Wanted:
    """A plan to make: as step_plan.Request. A topology that is a generation or a card alone, e.g. 'v5p' or
    'h100', asks for the smallest machine of that kind that the model fits."""

    model: str
    topology: str
    override: str = ""
    what: str = "train"
    mesh: str = ""


def moe(experts: int, layers: int) -> str:
    """The experiment's name in params/mt/m4.py, without its 'mt.'."""
    return f"M4MoE{experts}E{layers}L"


def weak(experts: int, layers: int, bf16: bool = False) -> str:
    """The name of the plan with an expert and 2048 target tokens on each v3 core."""
    # With the paper's batch 512 and 2048 experts have so many tokens already.
    return real(experts, layers) + "-2048_a_core" * (experts == 128) + "-bf16" * bf16


def real(experts: int, layers: int) -> str:
    """The name of the plan with the paper's own batch."""
    return f"{moe(experts, layers)}-{_file(CORES[experts])}"


def today(generation: str) -> str:
    """The name of the plan of BIG for the smallest slice of a generation."""
    return f"{BIG}-{generation}"


def on_gpus(model: str, card: str, bf16: bool = False) -> str:
    """The name of the plan for the smallest cluster of a card."""
    return f"{model}-{card}" + ("-bf16" if bf16 else "")


def _file(topology: str) -> str:
    return topology.replace(":", "_")


BIG = moe(2048, 36)
DENSE_NAME = f"{DENSE}-{_file(CORES[2048])}"
PIPELINED_NAME = f"T96LPipe8-{_file(CORES[2048])}"
DECODE = f"{real(2048, 36)}-decode"
GPU_MODELS = (*(moe(experts, 36) for experts in sorted(CORES, reverse=True)), DENSE)
# The paper's model of 600 billion parameters on 256 GPUs, which need not be the fewest that hold it.
ON_CLUSTER = f"{BIG}-h100_32x8"

# Figure 2: as many experts, groups and times 2048 tokens as devices, in 36 layers.
COMPILED = {
    8: "M4MoE2048E36L-v3_2x2-8E",
    32: "M4MoE2048E36L-v3_4x4-32E",
    **{experts: weak(experts, 36) for experts in CORES},
}


TABLE3 = {
    **{(experts, layers): real(experts, layers) for experts in CORES for layers in (12, 36)},
    (2048, 60): weak(2048, 60),
}
_DATA: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
REQUESTS = {name: Wanted(**wanted) for name, wanted in _DATA["plans"].items()}
# The plans that each group of figures reads. Table 1 counts the parameters of table 3's plans.
GROUPS: Mapping[str, Sequence[str]] = _DATA["groups"]
