"""Locks a run's directory, so that only one trainer at a time works there, and one evaluator (`--mode=eval`) beside it.

Process 0 of a trainer's job holds `.trainer.lock` and writes its identity into it. The other processes of the job
compare that with what process 0 sent them, so that all use the same directory. Each of them holds its own file,
`.trainer.lock.<i>`: the directory is free when all of them have ended. An evaluator holds `.evaluator.lock`.

The locks use flock. The kernel releases them when a process ends for any reason, so the file of a killed trainer locks
nothing. On network file systems the locks hold between machines if the server supports them (NFS since
Linux 2.6.12, Lustre mounted with `flock`). If there are no locks at all, the trainer warns and continues.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lingvo_moe.core.files.files import naming


class LockHolder(NamedTuple):
    """The kind of command that holds a lock."""

    name: str  # what errors call it
    file: str  # the name of the lock file

    def Owns(self, name: str) -> bool:
        """Whether a file of that name is its lock, or that of another process of its job."""
        return name == self.file or name.startswith(f"{self.file}.")


TRAINER = LockHolder("trainer", ".trainer.lock")
EVALUATOR = LockHolder("evaluator (--mode=eval)", ".evaluator.lock")
LOCK_FILE = TRAINER.file
DESCRIPTION, CHECKPOINTS = "experiment.json", "checkpoints"  # what makes a directory a run
IMPORTING = "importing"  # what an import that is not complete has written
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_PATIENCE = 0.5  # seconds: a trainer that was just killed may take a moment to end

_held: set[int] = set()


def _close_in_child() -> None:
    """A forked child must not keep a lock that its parent held."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLockError(ValueError):
    """Another holder is at work in the directory, or the job's other processes use another directory."""


def is_lock_file(name: str) -> bool:
    """Whether a file of that name is the lock of a trainer, of another process of its job, or of an evaluator."""
    return TRAINER.Owns(name) or EVALUATOR.Owns(name)


def find_held_lock(directory: str | os.PathLike) -> str | None:
    """The name of a lock file that a trainer holds in a directory; None where no trainer is at work.

    Nothing is written. A file that cannot be opened to read, and one on a file system without locks, counts as free.

    Raises:
        OSError: the lock cannot be tried for another reason; it names the file.
    """
    if not os.path.isfile(os.path.join(directory, LOCK_FILE)):
        return None
    try:
        names = sorted(filter(TRAINER.Owns, os.listdir(directory)))
    # It has just gone; or only names that are known can be opened.
    except (FileNotFoundError, PermissionError):
        names = [LOCK_FILE]
    return next((name for name in names if _is_held(os.path.join(directory, name))), None)


def _is_held(path: str) -> bool:
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return False
    _held.add(handle)
    try:
        with naming(path):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as e:
        if e.errno not in (*_NO_LOCKS, errno.ESTALE):
            raise
    finally:
        _release(handle)
    return False


class RunLock:
    """Keeps other holders of its kind out of a run's directory until it is closed.

    Usage:
        with RunLock(logdir) as lock:
            lock.Acquire()               # process 0, before it reads or writes there
            lock.Join(token, process)    # other processes, with the lock.token of process 0

    In the end the lock's file is removed, unless there is a run by then; and so are directories that Acquire made, if
    they are empty.

    Attributes:
        token: names this lock; sent to the job's other processes.
    """

    def __init__(self, logdir: str | os.PathLike, holder: LockHolder = TRAINER):
        """Args: the directory that --logdir names; what holds the lock."""
        self._said = f"--logdir={os.fspath(logdir)}"
        self._logdir = Path(os.path.realpath(logdir))
        self._handle: int | None = None
        self._holder, self._path = holder, self._logdir / holder.file
        self._made: list[Path] = []
        self.token = secrets.token_hex(16)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.Close()

    def Acquire(self) -> None:
        """Locks the directory, which is made when missing; again, when the directory was moved away.

        Raises:
            RunLockError: another holder is at work there; the message says which, if it is known.
            OSError: no permission, a full disk, or a lock that cannot be tried; it names the file.
        """
        handle = self._lock(self._path)
        self._take(handle)
        for other in self._logdir.iterdir():
            if other != self._path and self._holder.Owns(other.name):
                self._check_free(other)
        _write(handle, self._path, {"token": self.token, **who_i_am()})

    def Join(self, token: str, process: int) -> None:
        """Locks the directory for another process of the job whose process 0 holds it.

        `token` is RunLock.token of process 0.

        Raises:
            RunLockError: process 0 does not hold this directory, or this process runs twice.
            OSError: as Acquire.
        """
        if _read(self._path).get("token") != token:
            raise RunLockError(
                f"{self._said}: process {process} sees another directory there than process 0 of the "
                f"job; give all processes the same --logdir, on a file system that all of them share"
            )
        self._path = self._logdir / f"{LOCK_FILE}.{process}"
        handle = self._lock(self._path)
        self._take(handle)
        _write(handle, self._path, who_i_am())

    def Close(self) -> None:
        """Releases the lock."""
        with contextlib.suppress(OSError):  # all was deleted, or must not be written any more
            # Only the file that is held: another trainer's may lie there since the directory was moved. Who waits
            # for this one finds, once it has the lock, that the file is no longer there, and makes a new one.
            if (
                self._handle is not None
                and not self._is_run()
                and _lies_at(self._handle, self._path)
            ):
                self._path.unlink()
        self._take(None)
        with contextlib.suppress(OSError):  # something was put there
            for directory in self._made:
                directory.rmdir()
        self._made = []

    def _is_run(self) -> bool:
        """Whether the lock's file is that of a run, where it stays for the next trainer."""
        names = (DESCRIPTION, CHECKPOINTS) if self._path.name == LOCK_FILE else ()
        return any(os.path.lexists(self._logdir / name) for name in names)

    def _take(self, handle: int | None) -> None:
        if self._handle is not None:
            _release(self._handle)
        self._handle = handle

    def _check_free(self, path: Path) -> None:
        """Raises RunLockError where another process of an earlier job still holds its file."""
        with contextlib.suppress(FileNotFoundError):  # it has just gone
            _release(self._lock(path, os.O_RDWR))

    def _lock(self, path: Path, how: int = os.O_RDWR | os.O_CREAT) -> int:
        """A handle of the file, locked. Raises RunLockError where another one holds it."""
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                if how & os.O_CREAT:
                    self._make_directory()
                # No link is followed: what it leads to would be written over.
                handle = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                # A trainer that gave up may just have removed the directory.
                if how & os.O_CREAT and time.monotonic() < until:
                    continue
                raise
            _held.add(handle)
            try:
                with naming(path):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # The directory may have been moved away, or the file removed, since it was opened.
                    if _lies_at(handle, path):
                        return handle
                _release(handle)
            except BlockingIOError:
                _release(handle)
                if time.monotonic() > until:
                    raise self._refusal(path) from None
                time.sleep(0.05)
            except OSError as e:
                if e.errno in _NO_LOCKS:
                    self._warn(e)
                    return handle
                _release(handle)
                # NFS: the file was removed on another machine since it was opened.
                if e.errno != errno.ESTALE or time.monotonic() > until:
                    raise

    def _warn(self, error: OSError) -> None:
        print(
            f"warning: {self._said}: its file system has no locks ({error.strerror}); nothing "
            f"keeps a second {self._holder.name} out",
            file=sys.stderr,
        )

    def _make_directory(self) -> None:
        made = [p for p in (self._logdir, *self._logdir.parents) if not p.exists()]
        self._logdir.mkdir(parents=True, exist_ok=True)
        self._made = made or self._made

    def _refusal(self, path: Path) -> RunLockError:
        return RunLockError(
            f"{self._said}: another {self._holder.name} is at work there{in_words(_read(path))}; wait, stop it, or "
            "give another --logdir"
        )


def who_i_am() -> dict[str, Any]:
    """This process, and the time, for others that find its lock."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def in_words(holder: Mapping[str, Any]) -> str:
    """The end of a sentence about a holder, of which it has what `who_i_am` says; '' where it is not known."""
    if not holder.keys() >= {"pid", "host", "since"}:
        return ""
    return f" (process {holder['pid']} on {holder['host']}, since {holder['since']})"


def _write(handle: int, path: Path, content: dict[str, Any]) -> None:
    with naming(path):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(content).encode() + b"\n", 0)
        os.fsync(handle)  # for processes on other machines


def _lies_at(handle: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _read(path: Path) -> dict[str, Any]:
    """Returns the contents of a lock's file; an empty dict if it is missing, half written or damaged."""
    try:
        return holder_in(path.read_bytes())
    except OSError:
        return {}


def holder_in(content: bytes) -> dict[str, Any]:
    """The holder that a lock's contents describe; an empty dict if they are empty, half written or damaged."""
    try:
        holder = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _release(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)
