"""Files and directories that are there whole or not at all, and one writer at a time.

What is made has the permissions that the umask gives, as if it had been opened plainly.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_RANDOM = 6  # bytes of a temporary name


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Gives the errors of writing, e.g. of a full disk, the name of the file, which the system leaves out."""
    try:
        yield
    except OSError as e:
        if e.errno is None or e.filename is not None:
            raise
        raise type(e)(e.errno, e.strerror, os.fspath(path)) from e


def append(path: str | os.PathLike, data: bytes) -> None:
    """Adds to the end of a file, which is made when missing: all of the data, or, where that fails, none.

    Raises:
        OSError: e.g. a full disk; it names the file.
    """
    with naming(path), open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        except BaseException:
            file.truncate(end)
            raise


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yields a file to write, which takes the place of `path` when the block ends without an error.

    Where `path` is a link, what it points to is replaced.
    """
    target = Path(os.path.realpath(path))
    temp = _beside(target)
    # tempfile would make it readable for the owner alone, whatever the umask.
    handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # The file that was asked for, not its temporary name.
        with naming(path), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, target)
    except BaseException:
        os.unlink(temp)
        raise


def write_atomic(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file whole or not at all."""
    with atomic_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory beside `path`, which takes its place when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp, old = _beside(path), _beside(path)
    temp.mkdir()
    try:
        yield temp
        if path.exists():
            path.rename(old)  # deleting it takes a while, in which there must be one of the two
        try:
            temp.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def clear_leftovers(path: Path) -> None:
    """Deletes what killed writers of `path` left beside it. Only for who knows that nobody is writing it now."""
    for left in path.parent.iterdir():
        if not re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{{2 * _RANDOM}}}", left.name):
            continue
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Holds a lock on a directory among the processes of this machine; the others wait, then find the work done."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _beside(path: Path) -> Path:
    """A new hidden name in the same directory."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_RANDOM)}")
