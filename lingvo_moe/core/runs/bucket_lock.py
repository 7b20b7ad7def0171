"""Keeps a second writer out of a place in a bucket, where files cannot be locked; and the lock of a run there.

The object WRITER says who writes there, and its holder renews it. Whoever comes later watches it: one that is not
renewed for a while was left by a process that was killed, and is taken over, by one of those who wait for it.

A holder that was only suspended goes on later, between any two requests, or its last request comes late. So it renews
the lock, on the condition that it is still its own, before each file and each step that it writes; and that one last
request can harm nothing: files of a run have generations (core/files/copies.py), steps are written below names of
their writers (saved_steps.py), and the lock itself is never deleted, since a bucket deletes on no condition.
"""

import contextlib
import json
import secrets
import threading
import time

from lingvo_moe.core.console.command import say
from lingvo_moe.core.files.copies import WRITER, LocalCopy, local_copy
from lingvo_moe.core.files.store import Bucket, StoreError, is_address
from lingvo_moe.core.runs.run_lock import RunLock, RunLockError, holder_in, in_words, who_i_am

RENEWAL = 5.0  # seconds between renewals
PATIENCE = 30.0  # seconds without a renewal after which a holder counts as dead
PUSHING = 60.0  # seconds between two looks for changed files of a run


class BucketLock:
    """Held from its making until Close.

    Raises RunLockError: another writer is at work there. StoreError: the bucket fails.
    """

    def __init__(self, place: Bucket):
        self._place, self._token, self._number = place, secrets.token_hex(16), 0
        self._me = {"token": self._token, **who_i_am()}
        self._generation = self._Take()
        self._lost, self._closing, self._renewing = "", threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._KeepRenewing, name="bucket lock", daemon=True)
        self._thread.start()

    def Check(self) -> None:
        """Renews it, before a step is complete. Raises as Renew."""
        self.Renew()

    def Renew(self) -> None:
        """Makes sure that it is still held.

        Raises RunLockError: another writer has taken the place over, as when this process stood still. StoreError.
        """
        with self._renewing:
            if self._lost:
                raise RunLockError(self._lost)
            try:
                self._generation = self._Renewed()
            except RunLockError as e:
                self._lost = str(e)
                raise

    def Close(self) -> None:
        """Ends it; the object says so, where it is still this writer's and the bucket works."""
        self._closing.set()
        self._thread.join()
        if not self._lost:
            with contextlib.suppress(StoreError):
                self._place.Replace(WRITER, self._Content(ended=True), self._generation)

    def _Content(self, ended: bool = False) -> bytes:
        self._number += 1
        return json.dumps({**self._me, "number": self._number, "ended": ended}).encode()

    def _Take(self) -> bytes:
        """Returns the generation of the object that this writer wrote."""
        before = self._place.Version(WRITER)
        until = time.monotonic() + PATIENCE
        while True:
            # An absent object, and one that has ended or stayed the same for so long, is replaced, unless somebody else
            # was quicker.
            if before.value is None or _has_ended(before.value) or time.monotonic() > until:
                if taken := self._place.Replace(WRITER, self._Content(), before.generation):
                    return taken
                raise self._Refusal(self._place.Version(WRITER).value)
            time.sleep(min(1.0, PATIENCE / 10))
            new = self._place.Version(WRITER)
            if new.generation != before.generation and new.value and not _has_ended(new.value):
                raise self._Refusal(new.value)
            before = new

    def _Refusal(self, content: bytes | None) -> RunLockError:
        by = in_words(holder_in(content or b""))
        return RunLockError(
            f"{self._place.address}: another writer is at work there{by}; wait, stop it, or name another place"
        )

    def _KeepRenewing(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(RENEWAL):
            try:
                self.Renew()
                last = time.monotonic()
            except StoreError as e:
                if time.monotonic() - last < PATIENCE:
                    continue
                self._lost = f"{self._place.address}: {WRITER} could not be renewed: {e}"
                return
            except RunLockError:
                return

    def _Renewed(self) -> bytes:
        """Replaces the object, and returns its generation. Raises RunLockError: it is another writer's."""
        if renewed := self._place.Replace(WRITER, self._Content(), self._generation):
            return renewed
        new = self._place.Version(WRITER)
        # An earlier renewal that counts as failed may have been done all the same.
        if holder_in(new.value or b"").get("token") != self._token:
            raise self._Refusal(new.value)
        return new.generation


def _has_ended(content: bytes) -> bool:
    return bool(holder_in(content).get("ended"))


class BucketRunLock:
    """Locks a run at an address as RunLock does, and keeps its files equal to the copy of process 0.

    Attributes:
        held: by process 0, from Acquire to Close; None on others.
    """

    def __init__(self, address: str):
        self.token = secrets.token_hex(16)
        self._address = address
        self.held: HeldRun | None = None

    def __enter__(self) -> "BucketRunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.Close()

    def Acquire(self) -> None:
        """Locks the address, and copies the run as it is then. Raises RunLockError, OSError."""
        self.held = HeldRun(local_copy(self._address))

    def Join(self, token: str, process: int) -> None:
        """Copies the run for another process of the job, as process 0 has described it. Raises OSError."""
        local_copy(self._address).Fetch()

    def Close(self) -> None:
        """Writes what has changed, and releases the address. Raises RunLockError, StoreError."""
        if self.held:
            self.held.Close()


class HeldRun(BucketLock):
    """The lock of a run, which also writes the files that change to the bucket: in Check, and once a minute."""

    def __init__(self, copy: LocalCopy):
        super().__init__(copy.store)
        self._copy = copy
        try:
            copy.Fetch()  # again: another trainer may have been at work since it was made
        except BaseException:
            super().Close()
            raise
        copy.holds, self._ending = self.Renew, threading.Event()
        self._pushing = threading.Thread(target=self._Push, name="run", daemon=True)
        self._pushing.start()

    def Check(self) -> None:
        """Writes the files that have changed, then checks the lock: a complete step has its lines of metrics."""
        self._copy.Push()
        self.Renew()

    def Close(self) -> None:
        """Writes what has changed, and ends it. Raises as Check."""
        self._ending.set()
        self._pushing.join()
        try:
            self._copy.Push()
        finally:
            self._copy.holds = None
            super().Close()

    def _Push(self) -> None:
        while not self._ending.wait(PUSHING):
            try:
                self.Check()
            except OSError as e:  # of the bucket, or a file went while it was read
                say(f"warning: {e}; it is tried again")
            except RunLockError:  # the next checkpoint says so
                return


TrainerLock = RunLock | BucketRunLock


def lock_of(logdir: str) -> TrainerLock:
    """The lock of a trainer's run in a directory or at an address."""
    return BucketRunLock(logdir) if is_address(logdir) else RunLock(logdir)
