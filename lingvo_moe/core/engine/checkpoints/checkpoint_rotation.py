"""Says which checkpoints of a run stay when a new one is saved."""

from collections.abc import Sequence
from typing import Any


class Rotation:
    """Orbax's policy of what stays: the newest steps, the best one, and one that is known to be good.

    Attributes:
        best: its step, or None.
        before: the newest checkpoint before this step is known to be good.
    """

    def __init__(self, newest: int):
        """Args: how many of the newest steps stay."""
        self._newest = newest
        self.best: int | None = None
        self.before = 0

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """For each checkpoint, oldest first, whether it stays."""
        del context
        newest = len(checkpoints) - self._newest
        good = max((info.step for info in checkpoints if info.step < self.before), default=None)
        return [i >= newest or info.step in (self.best, good) for i, info in enumerate(checkpoints)]
