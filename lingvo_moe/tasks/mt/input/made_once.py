"""Caches directories: each has a list of its files with their digests.

An undamaged directory is used again; a damaged one is made again.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from lingvo_moe.core.files import files
from lingvo_moe.core.files.manifest import ManifestError, verify_manifest, write_manifest

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
