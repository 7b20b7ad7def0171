"""Limits a search's programs and time, before each compile: a compiler that has begun cannot be stopped."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

_MORE = 3  # programs that a longer search should have time for, in the advice
COMPILES, MINUTES = "--compiles", "--minutes"


class SearchBudget:
    """The limits of a search. The time runs from when it is made.

    Args:
        compiles: programs that are compiled on a machine at most.
        seconds: when the search should be over.
        verifies: whether the winner is verified, which takes time too.
    """

    def __init__(
        self,
        compiles: int,
        seconds: float,
        verifies: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._compiles, self._seconds, self._verifies = compiles, seconds, verifies
        self._clock, self._started = clock, clock()
        self._longest = 0.0  # seconds of a compile or a verification so far

    @contextlib.contextmanager
    def Working(self) -> Iterator[None]:
        """Wraps a compile or a verification, whose duration tells how long the next one may take."""
        began = self._clock()
        try:
            yield
        finally:
            self._longest = max(self._longest, self._clock() - began)

    def Limit(self, compiled: int) -> str:
        """The limit that forbids to compile one more program after `compiled` ones; '' if none does.

        A program is begun only if it, and the verification of the winner, can end in time if each takes as long as the
        longest so far. The first one is always begun.
        """
        if not compiled:
            return ""
        if compiled >= self._compiles:
            return f"{COMPILES}={self._compiles}"
        return "" if self._After(1) <= self._seconds else f"{MINUTES}={self._seconds / 60:g}"

    def Advice(self, compiled: int) -> str:
        """The limits with which a search has room for a few more programs, as flags, after `compiled` ones."""
        flags = []
        if compiled + _MORE > self._compiles:
            flags.append(f"{COMPILES}={compiled + _MORE}")
        if self._After(_MORE) > self._seconds:
            flags.append(f"{MINUTES}={math.ceil(self._After(_MORE) / 60)}")
        return " ".join(flags)

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return self._clock() - self._started

    def _After(self, programs: int) -> float:
        """Estimates when so many more programs, and the verification, are over."""
        return self.elapsed + (programs + self._verifies) * self._longest
