"""Says which checkpoints of a run stay when a new one is saved."""

from collections.abc import Sequence
from typing import Any


class Rotation:
    """Orbax's policy of what stays: the newest steps, and the best one.

    Attributes:
        best: its step, or None.
    """

    def __init__(self, newest: int):
        """Args: how many of the newest steps stay."""
        self._newest = newest
        self.best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """For each checkpoint, oldest first, whether it stays."""
        del context
        newest = len(checkpoints) - self._newest
        return [i >= newest or info.step == self.best for i, info in enumerate(checkpoints)]
