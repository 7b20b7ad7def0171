"""Training steps that others measured and published, and some that we measured, as requests for plans.

They are data, published.json. A source is a publication with a model, a machine, a layout and a time; what it leaves
open is in `doubt`, and such rows count apart. Where a source states a rate, `reported` has it, and the seconds follow
from the source's own count of operations: of MaxText 6 FLOPs a weight and token, and attention in full; of Megatron
(arXiv:2104.04473, section 5.1) 96 B s l h^2 (1 + s / 6h + V / 16lh), which includes recomputation. MaxText kept
inputs of layers with experts in the hosts' memory, where the requests compute them again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS

from .requests import Wanted

PREFIX = "published-"  # the start of the recorded plans' names
OURS = "measured here, with benchmarks.gpu.train; JAX 0.11.2, CUDA 13"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A step of a published measurement."""

    number: str  # the row, with what varies in it, e.g. '15 x4'
    what: str  # the model and what ran it
    wanted: Wanted  # the request for a plan
    seconds: float  # measured, or by the source's own count of operations
    source: str  # where it was published
    reported: str = ""  # the rate that the source states in place of seconds
    doubt: str = ""  # what the source leaves open; '' if nothing
    fitted: bool = False  # whether a number of the model of time was fitted to it
    why: str = ""  # the reason why its estimate is far off; '' if it is not, or not known why

    @property
    def ours(self) -> bool:
        """Whether the measured program is the very one that is planned."""
        return self.source == OURS

    @property
    def name(self) -> str:
        """The name of its recorded plan."""
        return PREFIX + self.number.replace(" ", "_")

    @property
    def kind(self) -> str:
        """The TPU generation or the card."""
        return self.wanted.topology.partition(":")[0]

    @property
    def device(self) -> str:
        """'tpu' or 'gpu'."""
        return "gpu" if self.kind in CARDS else "tpu"


_DATA: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
ROWS: Sequence[Row] = [Row(**{**row, "wanted": Wanted(**row["wanted"])}) for row in _DATA["rows"]]
REQUESTS = {row.name: row.wanted for row in ROWS}
RATIOS: Sequence[tuple[str, str, str]] = _DATA["ratios"]  # two rows, and what changes between them
LEFT_OUT: Sequence[tuple[str, str]] = _DATA["left_out"]  # rows that are not planned, and why
