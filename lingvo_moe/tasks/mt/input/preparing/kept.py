"""What a job of tools.prepare made stays in a directory, with a list of its files, until all jobs are done.

A command that goes on takes what is as it was written, and makes again what is not.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from lingvo_moe.core import files
from lingvo_moe.core.manifest import ManifestError, verify_manifest, write_manifest

_LIST = "files.sha256"
_log = logging.getLogger(__name__)


def is_made(directory: Path) -> bool:
    """Whether a job's directory is there and as it was written; a damaged one is said."""
    if not directory.exists():
        return False
    try:
        verify_manifest(directory, _LIST, remedy="it is made again")
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
