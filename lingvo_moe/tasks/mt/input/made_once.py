"""Caches directories: each has a list of its files with their digests.

An undamaged directory is used again; a damaged one is made again.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from lingvo_moe.core.files import files
from lingvo_moe.core.files.manifest import ManifestError, verify_manifest, write_manifest

_LIST = "files.sha256"
_log = logging.getLogger(__name__)


def verify_made(directory: Path) -> None:
    """Raises ManifestError unless all files are as `making` left them."""
    verify_manifest(directory, _LIST, remedy="it is made again")


def is_made(directory: Path) -> bool:
    """Whether a directory exists and is undamaged; warns if it is damaged."""
    if not directory.exists():
        return False
    try:
        verify_made(directory)
    except ManifestError as e:
        _log.warning("%s", e)
        return False
    return True


@contextlib.contextmanager
def making(directory: Path) -> Iterator[Path]:
    """Yields an empty directory to fill; it takes its place, listed, when the block ends without an error."""
    with files.replaced_directory(directory) as temp:
        yield temp
        write_manifest(temp, _LIST)
