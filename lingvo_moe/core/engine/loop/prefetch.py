"""Makes the next batches in the background while the devices compute a step."""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from lingvo_moe.core.input.base_input import BatchIterator
from lingvo_moe.core.nested_map import NestedMap

_AHEAD = 2  # batches: one is ready when a step ends early, and memory holds few


class Prefetched(BatchIterator):
    """The batches of another iterator, made in a thread ahead of time.

    `GetState` is the position after the batch that was last returned, whatever has been made since. An error of the
    other iterator is raised when its batch is asked for.

    Usage:
        with Prefetched(iter(inputs)) as batches:  # the thread ends with the block
            batch = next(batches)

    Attributes:
        waited: seconds that `__next__` and `Await` have waited for batches since it was last set to 0.
    """

    def __init__(self, batches: BatchIterator):
        """Makes nothing before the first batch is asked for."""
        self._batches = batches
        self._state = batches.GetState()
        self._begun: deque[Future[tuple[NestedMap, dict[str, Any]]]] = deque()
        # A single thread: batches are made in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.waited = 0.0

    @property
    def ready(self) -> bool:
        """Whether the next batch is there already."""
        return bool(self._begun) and self._begun[0].done()

    def __next__(self) -> NestedMap:
        self.Await()
        batch, self._state = self._begun.popleft().result()
        return batch

    def Await(self) -> None:
        """Waits until the next batch is there, or its error."""
        self._Begin()
        start = time.monotonic()
        self._begun[0].exception()
        self.waited += time.monotonic() - start

    def _Begin(self) -> None:
        while len(self._begun) <= _AHEAD:
            self._begun.append(self._thread.submit(self._Make))

    def _Make(self) -> tuple[NestedMap, dict[str, Any]]:
        return next(self._batches), self._batches.GetState()

    def GetState(self) -> dict[str, Any]:
        return self._state

    def SetState(self, state: Mapping[str, Any]) -> None:
        self._Discard()
        self._batches.SetState(state)
        self._state = self._batches.GetState()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._Discard()
        self._thread.shutdown()

    def _Discard(self) -> None:
        """Cancels batches that are not begun and waits for the one that is."""
        for future in self._begun:
            future.cancel()
        for future in self._begun:
            if not future.cancelled():
                future.exception()
        self._begun.clear()
