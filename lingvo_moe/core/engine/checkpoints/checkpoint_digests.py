"""Digests of a checkpoint's files: written before the checkpoint gets its name, verified before it is used.

Orbax writes a step into a directory with a temporary name and renames it when it is complete. The list of digests is
written just before the renaming, so every named step has its list, whenever a process was killed. Digests are of the
files as read back at that time; earlier changes by the disk are not detected.
"""

import asyncio
import os
from pathlib import Path

import orbax.checkpoint as ocp

from lingvo_moe.core.files.manifest import XXH128, ManifestError, verify_manifest, write_manifest

NAME = "files.xxh128"


class NotListedError(ManifestError):
    """A step without a list of digests, so that damage could not be detected."""


class DigestedDirectory(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary directory of a step, or of an item in it, that lists its files before it is renamed."""

    async def finalize(self) -> None:
        """Writes the list if the directory is a step, and renames it. Called by Orbax on one process."""
        if self._checkpoint_metadata_store:
            # Orbax writes metadata of the step in a thread; nothing may change once it is listed.
            await asyncio.to_thread(self._checkpoint_metadata_store.wait_until_finished)
        if self.get_final().name.isdigit():
            await asyncio.to_thread(write_manifest, os.fspath(self.get()), NAME, None, XXH128)
        await asyncio.to_thread(self.get().rename, self.get_final())


def verify_step(directory: str | os.PathLike, part: tuple[int, int] = (0, 1)) -> None:
    """Compares the files of a step with their digests.

    `part` (i, n): this process takes the i-th share of n.

    Raises:
        NotListedError: there is no list.
        ManifestError: names the file that is damaged or missing, or was added.
        OSError: a file cannot be read.
    """
    if not Path(directory, NAME).is_file():
        raise NotListedError(
            f"{NAME}, the list of its files, is missing, so damage cannot be detected: the list was deleted, or "
            "the checkpoint is by an older version; if you know that the files are undamaged, docs/security.md has the "
            "command that lists them again"
        )
    verify_manifest(Path(directory), NAME, remedy="restore it from a copy", part=part)
