"""Writes files and directories atomically (complete or absent), with one writer at a time.

New files have the permissions that the umask gives. Write errors name the final file, not the temporary one beside it.
Here, too, the files of JSON that others wrote are read.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

_RANDOM = 6  # bytes of a temporary name
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOENT)


def open_to_write(path: str | os.PathLike, mode: str = "wb") -> BinaryIO:
    """`open(path, mode)` for mode 'wb' or 'ab', whose write errors (e.g. a full disk) name the file."""
    return cast(BinaryIO, io.BufferedWriter(_Named(path, path, mode)))


def reserve(path: str | os.PathLike, size: int) -> None:
    """Makes a file of zeros with allocated space: on a full disk, writing to a mapped file would kill the process.

    Raises OSError: there is no space for it; the file is named.
    """
    with open(path, "wb") as file, naming(path):
        os.posix_fallocate(file.fileno(), 0, size)


class _Named(io.FileIO):
    """A file whose write errors name it; the operating system names a file only in errors of opening."""

    def __init__(self, file: Any, named: str | os.PathLike, mode: str = "wb"):
        super().__init__(file, mode)
        self._named = named

    def write(self, data: Any) -> int:
        with naming(self._named):
            return super().write(data)


def not_written(error: Exception, path: str | os.PathLike) -> OSError:
    """The OSError that another library's exception describes in its message, e.g. of a full disk."""
    code = next((number for number in _WRITING if os.strerror(number) in str(error)), errno.EIO)
    return OSError(code, os.strerror(code), os.fspath(path))


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Adds this file's name to an OSError from the block."""
    try:
        yield
    except OSError as e:
        if e.errno is None:
            raise
        raise OSError(e.errno, e.strerror, os.fspath(path)) from e


def append(path: str | os.PathLike, data: bytes) -> None:
    """Appends to a file, which is made if missing: all of the data, or none if that fails.

    Raises OSError: e.g. a full disk; it names the file.
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
    """Yields a file to write, which replaces `path` when the block ends without an error.

    If `path` is a link, its target is replaced.

    Raises:
        OSError: the file cannot be written; it names `path`. What was there before stays.
    """
    target = Path(os.path.realpath(path))
    temp = _beside(target)
    with naming(path):
        # tempfile would make it readable for the owner alone, whatever the umask.
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with cast(BinaryIO, io.BufferedWriter(_Named(handle, path))) as file:
            yield file
            file.flush()
            with naming(path):
                os.fsync(file.fileno())
        with naming(path):
            os.replace(temp, target)
    except BaseException:
        os.unlink(temp)
        raise


def write_atomic(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file atomically. Raises as atomic_file."""
    with atomic_file(path) as file:
        file.write(data)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes a value as JSON that people can read. Raises as atomic_file."""
    write_atomic(path, json.dumps(value, indent=1).encode() + b"\n")


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Reads an object of JSON. Raises `error`, with a line that names the file: it is missing, or holds none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise error(f"{path}: {getattr(e, 'strerror', None) or e}") from None
    if not isinstance(content, dict):
        raise error(f"{path}: must be an object")
    return content


@contextlib.contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory beside `path`, which replaces it when the block ends without an error.

    Raises:
        OSError: from the block; a file in the new directory is named by its path in `path`.
    """
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
    except OSError as e:
        _name_in_place(e, temp, path)
        raise
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _name_in_place(error: OSError, temp: Path, path: Path) -> None:
    """Turns the path in `temp` that a write error names into one in `path`."""
    if error.filename is None:
        return
    named = Path(os.fsdecode(error.filename))
    if named.is_relative_to(temp):
        error.filename = os.fspath(path / named.relative_to(temp))


def link_or_copy(path: Path, target: Path) -> None:
    """Gives a file another name, too; a copy, where the disk has no links. Raises OSError: it cannot be written."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def clear_leftovers(path: Path) -> None:
    """Deletes temporary files that killed writers of `path` left. Call it only if nobody is writing `path`."""
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
