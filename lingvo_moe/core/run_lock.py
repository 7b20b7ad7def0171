"""The lock of a run's directory: one trainer at a time, for as long as it works there.

Process 0 of a job holds `.trainer.lock` and writes into it who it is. The other processes of the job compare that with
what process 0 sent them, so that all work in one directory, and each holds a file of its own, `.trainer.lock.<i>`: the
directory is free when all of them have gone.

The locks are flock's. The kernel releases them when a process ends, however it ends; nothing stale is left. On network
file systems they hold among machines where the server supports them (NFS since Linux 2.6.12, Lustre mounted with
`flock`); where there are none at all, the trainer warns and goes on.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

LOCK_FILE = ".trainer.lock"
_PATIENCE = 0.5  # seconds: a trainer that was just killed may take a moment to end

_held: set[int] = set()


def _close_in_child() -> None:
    """A forked child must not keep a lock that its parent held."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLockError(ValueError):
    """A directory that another trainer is at work in, or that is not that of the job's other processes."""


class RunLock:
    """Keeps other trainers out of a run's directory until it is closed.

    Usage:
        with RunLock(logdir) as lock:
            lock.Acquire()               # process 0, before it reads or writes there
            lock.Join(token, process)    # other processes, with the lock.token of process 0

    A directory that Acquire made, and nothing was written in, is removed in the end.

    Attributes:
        token: names this lock; sent to the job's other processes.
    """

    def __init__(self, logdir: str | os.PathLike, flag: str = "--logdir"):
        """Args: the directory; the flag that named it, for errors."""
        self._said = f"{flag}={os.fspath(logdir)}"
        self._logdir, self._flag = Path(os.path.realpath(logdir)), flag
        self._handle: int | None = None
        self._own_file: Path | None = None
        self._made: list[Path] = []
        self.token = secrets.token_hex(16)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.Close()

    def Acquire(self) -> None:
        """Locks the directory, which is made when missing; again, when the directory was moved away.

        Raises:
            RunLockError: another trainer is at work there; the message says which, if it is known.
            OSError: no permission, or a full disk; it names the file.
        """
        path = self._logdir / LOCK_FILE
        handle = self._lock(path)
        if handle is None:
            raise self._refusal(path)
        self._take(handle)
        for other in self._logdir.iterdir():
            if other.name.startswith(f"{LOCK_FILE}."):
                self._check_free(other)
        _write(handle, path, {"token": self.token, **_me()})

    def Join(self, token: str, process: int) -> None:
        """Locks the directory for another process of the job whose process 0 holds it.

        Args:
            token: RunLock.token of process 0.
            process: the number of this one, from 1.

        Raises:
            RunLockError: process 0 does not hold this directory, or this process runs twice.
        """
        if _read(self._logdir / LOCK_FILE).get("token") != token:
            raise RunLockError(
                f"{self._said}: process {process} sees another directory there than process 0 of the "
                f"job; give all processes the same {self._flag}, on a file system that all of them share"
            )
        path = self._logdir / f"{LOCK_FILE}.{process}"
        handle = self._lock(path)
        if handle is None:
            raise self._refusal(path)
        self._take(handle)
        self._own_file = path
        _write(handle, path, _me())

    def Close(self) -> None:
        """Lets others in."""
        if self._own_file is not None:
            self._own_file.unlink(missing_ok=True)
        # Only where this lock is held: another trainer's would be taken away otherwise.
        if self._handle is not None and self._made:
            with contextlib.suppress(OSError):  # something else was put there, or all was deleted
                if os.listdir(self._logdir) == [LOCK_FILE]:
                    (self._logdir / LOCK_FILE).unlink()
                    for directory in self._made:
                        directory.rmdir()
        self._take(None)
        self._own_file, self._made = None, []

    def _take(self, handle: int | None) -> None:
        if self._handle is not None:
            _release(self._handle)
        self._handle = handle

    def _check_free(self, path: Path) -> None:
        """Raises RunLockError where another process of an earlier job still holds its file."""
        with contextlib.suppress(FileNotFoundError):  # it has just gone
            handle = self._lock(path, os.O_RDWR)
            if handle is None:
                raise self._refusal(path)
            _release(handle)

    def _lock(self, path: Path, how: int = os.O_RDWR | os.O_CREAT) -> int | None:
        """A handle of the file, locked; None where another one holds it."""
        until = time.monotonic() + _PATIENCE
        while True:
            if how & os.O_CREAT:
                self._make_directory()
            # No link is followed: what it leads to would be written over.
            try:
                handle = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                if how & os.O_CREAT:  # one that gave up has just removed the directory
                    continue
                raise
            _held.add(handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _release(handle)
                if time.monotonic() > until:
                    return None
                time.sleep(0.05)
                continue
            except OSError as e:
                print(
                    f"warning: {self._said}: its file system has no locks ({e.strerror}); nothing "
                    "keeps a second trainer out",
                    file=sys.stderr,
                )
                return handle
            # The directory may have been moved away, or the file removed, since it was opened.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle
            _release(handle)

    def _make_directory(self) -> None:
        made = [p for p in (self._logdir, *self._logdir.parents) if not p.exists()]
        self._logdir.mkdir(parents=True, exist_ok=True)
        self._made = made or self._made

    def _refusal(self, path: Path) -> RunLockError:
        who = _read(path)
        by = ""
        if who.keys() >= {"pid", "host", "since"}:
            by = f" (process {who['pid']} on {who['host']}, since {who['since']})"
        return RunLockError(
            f"{self._said}: another trainer is at work there{by}; wait, stop it, or give another "
            f"{self._flag}"
        )


def _me() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def _write(handle: int, path: Path, content: dict[str, Any]) -> None:
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(content).encode() + b"\n", 0)
        os.fsync(handle)  # for processes on other machines
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e


def _read(path: Path) -> dict[str, Any]:
    """What a lock's file says; nothing where it is missing or half written."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _release(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)
