"""The held-out losses that a run has had while it trained: `evaluations.json` in its directory.

Anybody may have written the file, so its shape and its digest are checked. Free of TensorFlow and JAX.
"""

import hashlib
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lingvo_moe.core.runs.run_description import RunDirError

FILE = "evaluations.json"


class Evaluation(NamedTuple):
    """The held-out loss of the state after `step` steps; not finite where training has diverged."""

    step: int
    loss: float


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run on the same batches."""

    batches: str  # identifies the batches
    done: tuple[Evaluation, ...] = ()  # by step, ascending

    @property
    def best(self) -> Evaluation | None:
        """The lowest loss, the earlier of equal ones; None where none is finite."""
        return self.BestOf([e.step for e in self.done])

    def BestOf(self, steps: Collection[int]) -> Evaluation | None:
        """The lowest finite loss at some steps; None if none of them was evaluated."""
        finite = [e for e in self.done if e.step in steps and math.isfinite(e.loss)]
        return min(finite, key=lambda e: (e.loss, e.step), default=None)

    @property
    def without_best(self) -> int:
        """The number of evaluations since the best one."""
        best = self.best
        return sum(best is None or e.step > best.step for e in self.done)

    def UpTo(self, step: int) -> "Evaluations":
        """The evaluations of the first `step` steps."""
        return replace(self, done=tuple(e for e in self.done if e.step <= step))

    def With(self, step: int, loss: float) -> "Evaluations":
        """These and another one, which replaces that of the same step and those of later steps."""
        return replace(self, done=(*self.UpTo(step - 1).done, Evaluation(step, loss)))

    def WhyStopped(self, evaluations: int) -> str:
        """The reason that training ends where `evaluations` in a row may be without a new best; '' if it goes on."""
        if not evaluations or self.without_best < evaluations:
            return ""
        best = self.best
        lowest = f"that of step {best.step}, {best.loss:.4f}" if best else "none that is finite"
        return (
            f"the last {self.without_best} evaluations have no lower held-out loss than {lowest}; "
            f"train.early_stopping_evals={evaluations} ends training there, and 0 goes on"
        )

    def ToBytes(self) -> bytes:
        """The file, with a digest of itself."""
        losses = [[e.step, e.loss if math.isfinite(e.loss) else None] for e in self.done]
        about = {"batches": self.batches, "losses": losses}
        digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        return json.dumps({**about, "sha256": digest}, indent=1).encode() + b"\n"


def read_evaluations(file: Path, content: bytes) -> Evaluations:
    """The evaluations in `evaluations.json`. Raises RunDirError: it is not what Evaluations.ToBytes wrote."""
    try:
        saved = json.loads(content.decode("utf-8"))
        losses = [Evaluation(int(s), _loss(v)) for s, v in saved["losses"]]
        evaluations = Evaluations(str(saved["batches"]), tuple(losses))
    except (ValueError, KeyError, TypeError, RecursionError):
        evaluations = None
    if evaluations is None or evaluations.ToBytes() != content:
        raise RunDirError(
            f"{file}: was changed or damaged; delete it: the run goes on without it, and looks for its best "
            "checkpoint from there"
        )
    return evaluations


def _loss(value: Any) -> float:
    return math.nan if value is None else float(value)
