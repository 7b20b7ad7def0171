"""Says which checkpoints of a run stay when a new one is saved."""

from collections.abc import Sequence


class Rotation:
    """The steps that stay: the newest ones, the best one, and one that is known to be good.

    Attributes:
        best: its step, or None.
        before: the newest checkpoint before this step is known to be good.
    """

    def __init__(self, newest: int):
        """Args: how many of the newest steps stay."""
        self._newest = newest
        self.best: int | None = None
        self.before = 0

    def Leaving(self, steps: Sequence[int]) -> list[int]:
        """The steps, out of these in ascending order, that make place."""
        good = max((step for step in steps if step < self.before), default=None)
        return [step for step in steps[: -self._newest] if step not in (self.best, good)]
