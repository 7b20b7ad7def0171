"""Caches directories: each has a list of its files with their digests.

An undamaged directory is used again; a damaged one is made again.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lingvo_moe.core.files import files
from lingvo_moe.core.files.manifest import ManifestError, verify_manifest, write_manifest
from lingvo_moe.tasks.text.data.errors import DataError

_LIST = "files.sha256"
_log = logging.getLogger(__name__)


def verify_made(directory: Path) -> None:
    """Raises ManifestError unless all files are as `making` left them."""
    verify_manifest(directory, _LIST, remedy="it is made again")


def make_once(directory: str, write: Callable[[Path], None]) -> str:
    """Has `write` fill a directory, atomically, unless it exists; one that is damaged is made again, with a warning.

    Returns the directory.
    """
    path = Path(directory)
    if path.exists():
        try:
            verify_made(path)
            return directory
        except ManifestError as e:
            _log.warning("%s", e)
    with making(path) as temp:
        write(temp)
    return directory


@contextlib.contextmanager
def making(directory: Path) -> Iterator[Path]:
    """Yields an empty directory to fill; it takes its place, listed, when the block ends without an error."""
    with files.replaced_directory(directory) as temp:
        yield temp
        write_manifest(temp, _LIST)


@contextlib.contextmanager
def work_directory(output: Path, doing: str) -> Iterator[Path]:
    """Yields the hidden directory beside `output` for what is made on the way to it; removed after success.

    `doing` is what happens to the output, e.g. "preparing".

    Raises DataError: another process of this machine works there.
    """
    work = output.with_name(f".{output.name}.{doing}")
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise DataError(f"another process is {doing} {output}; wait until it is done") from e
        yield work
        shutil.rmtree(work)


def clear_others(work: Path, *keys: str) -> None:
    """Removes from a work directory what other settings than those of the keys left, and what was cut off."""
    for path in work.iterdir():
        if path.is_dir() and not path.name.endswith(keys):
            shutil.rmtree(path)
        elif path.is_dir():
            for cut_off in path.glob(".*"):
                shutil.rmtree(cut_off, ignore_errors=True)


def settings_key(settings: Any) -> str:
    """Names settings, which JSON can hold."""
    return hashlib.blake2b(json.dumps(settings).encode(), digest_size=8).hexdigest()
