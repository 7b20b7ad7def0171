"""The processes that a job has lost, as its watcher (watcher.py) finds them, and whether it can go on without them."""

import threading
from collections.abc import Sequence


class LostError(ValueError):
    """Another process of the job was lost, so that what waits for it ends."""


class Lost:
    """The lost processes of this process's job.

    Attributes:
        elastic: whether the others go on without them.
        suspected: whether this process waits for the loss to be found, so that it is looked for with less patience.
        left: whether this process has given up what it did with them.
    """

    def __init__(self) -> None:
        self.Begin(False)

    def Begin(self, elastic: bool) -> None:
        """Begins a job, which has lost none."""
        self.elastic, self.suspected, self.left = elastic, False, False
        self._numbers: Sequence[int] = ()
        self._known = threading.Event()

    def Tell(self, numbers: Sequence[int]) -> None:
        """Notes the numbers of lost processes."""
        self._numbers = numbers
        self._known.set()

    def Await(self, seconds: float) -> Sequence[int]:
        """The numbers of the lost processes, as soon as they are known; none after so many seconds."""
        self.suspected = True
        self._known.wait(seconds)
        return self._numbers

    def Check(self) -> None:
        """Raises LostError where a process was lost."""
        if self._known.is_set():
            raise LostError(f"lost: process {', '.join(map(str, self._numbers))} of the job")

    def MayHaveCaused(self, error: BaseException) -> bool:
        """Whether an error may be that of a collective, of which a process is gone."""
        at: BaseException | None = error
        while self.elastic and at is not None:
            # Gloo's errors are ValueErrors of XLA's.
            if (
                isinstance(at, LostError)
                or type(at).__name__ == "JaxRuntimeError"
                or "Gloo" in str(at)
            ):
                return True
            at = at.__cause__ or at.__context__
        return False


LOST = Lost()  # of this process
