"""A writer of a run in a bucket that is suspended, and taken for dead, destroys nothing of its successor's."""

import contextlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from lingvo_moe.core.engine.checkpoints import arrays
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
from lingvo_moe.core.files.copies import LocalCopy
from lingvo_moe.core.files.store import Bucket
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs import bucket_lock
from lingvo_moe.core.runs.run_lock import RunLockError, holder_in


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Whoever comes second takes the first one for dead at once, and nothing is done in the background."""
    monkeypatch.setattr(bucket_lock, "PATIENCE", 0.0)
    monkeypatch.setattr(bucket_lock, "RENEWAL", 1000.0)
    monkeypatch.setattr(bucket_lock, "PUSHING", 1000.0)


class Writer:
    """Writes a run as a trainer does: a line, other files, a checkpoint and a description, each step."""

    def __init__(self, address: str, number: int):
        self.number, self._stack = number, contextlib.ExitStack()
        self.copy = LocalCopy(address)
        self.lock = bucket_lock.HeldRun(self.copy)
        self._stack.callback(self.lock.Close)
        checkpointer = Checkpointer(f"{address}/checkpoints", keep=1, lock=self.lock)
        self.saved = self._stack.enter_context(checkpointer)
        self.saved.rotation.best = self.saved.LatestStep()

    def Train(self, steps: int) -> None:
        for _ in range(steps):
            step = (self.saved.LatestStep() or 0) + 1
            with open(self.copy.path / "metrics.jsonl", "a") as file:
                file.write(f"{self.number} {step}\n")
            if self.number == 1:  # the second one leaves it as it is
                (self.copy.path / "time.jsonl").write_text(f"{self.number} {step}")
            self.saved.Save(step, NestedMap(w=np.full([4], self.number)), {"by": self.number})
            self.saved.Wait()
            (self.copy.path / "evaluations.json").write_text(f"{self.number} {step}")
            self.copy.Push()

    def Close(self) -> None:
        self._stack.close()

    def CheckUndisturbed(self) -> None:
        """Checks that the run is as it is here, and that it can be gone on with; ends it."""
        store = self.copy.store
        assert holder_in(store.Read("WRITER"))["token"] == self.lock._token
        self._CheckSteps()
        self.Train(1)
        self._CheckSteps()
        self.Close()
        # The other one's last request may have made a file that this one does not have.
        files = {p.name: p.read_bytes() for p in self.copy.path.iterdir()}
        assert {name: store.Read(name) for name in files} == files
        bucket_lock.HeldRun(LocalCopy(store.address)).Close()  # it is free

    def _CheckSteps(self) -> None:
        best = self.saved.rotation.best
        with Checkpointer(self.saved.directory, read_only=True) as reader:
            steps = {self.saved.LatestStep(), best} - {None}
            assert reader.Steps() == sorted(steps)
            for step in steps:
                state, extra = reader.RestoreToNumpy(step=step)
                assert step == best or extra == {"by": self.number}
                np.testing.assert_array_equal(state.w, np.full([4], extra["by"]))


def _suspended(address: str, monkeypatch, chosen: Callable[[int, str], bool]) -> bool:
    """Suspends a writer before the chosen request, while a second one takes over and trains, and goes on afterwards.

    `chosen` gets the requests that it makes once it has locked the run: their number, and in words. Checks that the
    second one has not noticed. Returns whether there was such a request.
    """
    do, take, write = Bucket._Do, bucket_lock.BucketLock._Take, arrays.write
    count, second, locked = itertools.count(1), list[Writer](), list[bool]()

    def maybe_suspend(words: str) -> None:
        if locked and not second and chosen(next(count), words):
            second.append(None)
            second[0] = Writer(address, 2)
            second[0].Train(2)

    def requested(self, name, what, *args, **more):
        what_in_words = "delete" if args[1:] == (None,) else what
        maybe_suspend(f"{what_in_words} {f'{self.address}/{name}'.removeprefix(f'{address}/')}")
        return do(self, name, what, *args, **more)

    def written(*args):
        maybe_suspend("write arrays")
        write(*args)

    def taken(self):
        generation = take(self)
        locked.append(True)
        return generation

    with monkeypatch.context() as m:
        m.setattr(Bucket, "_Do", requested)
        m.setattr(arrays, "write", written)
        m.setattr(bucket_lock.BucketLock, "_Take", taken)
        with contextlib.suppress(RunLockError, CheckpointError), contextlib.ExitStack() as stack:
            first = Writer(address, 1)
            stack.callback(first.Close)
            first.Train(2)
    for writer in second:
        writer.CheckUndisturbed()
    return bool(second)


@pytest.mark.parametrize(
    "request_in_words",
    [
        "write arrays",
        "write metrics.jsonl",
        "write time.jsonl",
        "write evaluations.json",
        "write WRITER",
        "write checkpoints/1/COMMIT",
        "write checkpoints/2/COMMIT",
        "delete checkpoints/1/COMMIT",
        "delete_range checkpoints/1/",
    ],
)
def test_what_a_suspended_writer_was_about_to_do_harms_nothing(monkeypatch, request_in_words):
    address = f"memory://suspended/{request_in_words.replace(' ', '/')}"
    times = 0
    for skipped in itertools.count():
        alike = itertools.count(-skipped)
        if not _suspended(
            f"{address}/{skipped}",
            monkeypatch,
            lambda _, words, alike=alike: words == request_in_words and next(alike) == 0,
        ):
            break
        times += 1
    assert times


@pytest.mark.slow
def test_suspended_before_any_request_it_harms_nothing(monkeypatch):
    suspended = itertools.takewhile(
        lambda number: _suspended(f"memory://any/{number}", monkeypatch, lambda n, _: n == number),
        itertools.count(1),
    )
    assert len(list(suspended)) > 50
