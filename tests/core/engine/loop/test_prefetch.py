"""Batches made in the background: the same ones, in order, with positions that resume."""

import threading
import time

import pytest

from lingvo_moe.core.engine.loop.prefetch import Prefetched
from lingvo_moe.core.input.base_input import BatchIterator


class Counting(BatchIterator):
    """Batches 0, 1, 2, ...; number `fails_at` is an error."""

    def __init__(self, fails_at=None, seconds=0.0):
        self.position, self._fails_at, self._seconds = 0, fails_at, seconds
        self.made = threading.Semaphore(0)

    def __next__(self):
        time.sleep(self._seconds)
        if self.position == self._fails_at:
            raise ValueError(f"batch {self.position} is damaged")
        self.position += 1
        self.made.release()
        return self.position - 1

    def GetState(self):
        return {"position": self.position}

    def SetState(self, state):
        self.position = state["position"]


def test_batches_come_in_order_and_the_position_is_that_of_the_last_one_returned():
    with Prefetched(Counting()) as batches:
        assert batches.GetState() == {"position": 0}
        for i in range(20):
            assert next(batches) == i
            assert batches.GetState() == {"position": i + 1}
        batches.SetState({"position": 7})
        assert batches.GetState() == {"position": 7}
        assert [next(batches) for _ in range(3)] == [7, 8, 9]


def test_the_next_batches_are_made_while_nobody_waits():
    inner = Counting()
    with Prefetched(inner) as batches:
        assert not batches.ready
        next(batches)
        for _ in range(3):
            assert inner.made.acquire(timeout=60)
        assert next(batches) == 1


def test_the_first_batch_is_awaited_without_being_taken():
    with Prefetched(Counting()) as batches:
        batches.Await()
        assert batches.ready and batches.GetState() == {"position": 0}
        assert next(batches) == 0
    with Prefetched(Counting(fails_at=0)) as batches:
        batches.Await()
        with pytest.raises(ValueError, match="batch 0 is damaged"):
            next(batches)


def test_an_error_is_raised_when_its_batch_is_asked_for():
    with Prefetched(Counting(fails_at=2)) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(ValueError, match="batch 2 is damaged"):
            next(batches)
        assert batches.GetState() == {"position": 2}


def test_the_time_that_is_waited_is_measured_and_the_thread_ends():
    with Prefetched(Counting(seconds=0.1)) as batches:
        next(batches)
        assert batches.waited > 0.04
        before = batches.waited
        time.sleep(0.4)  # a long step
        next(batches)
        assert batches.waited - before < 0.04
    assert not [t for t in threading.enumerate() if t.name.startswith("batches")]
