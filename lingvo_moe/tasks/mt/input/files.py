"""Files and directories that are there whole or not at all, and one writer at a time."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all."""
    handle, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temp, 0o644)
        os.replace(temp, path)
    except BaseException:
        os.unlink(temp)
        raise


@contextlib.contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory beside `path`, which takes its place when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temp
        temp.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        temp.rename(path)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Holds a lock on a directory among the processes of this machine; the others wait, then find the work done."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
