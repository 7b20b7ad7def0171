"""The checkpoints of a run, one place a step: which are complete, and how one becomes complete at once.

In a directory, a step is written under another name, and renamed. A bucket can rename nothing: a step is complete when
its object COMMIT is there, which is written last, and only if there is none, so that of two writers one is refused. It
holds the digest of the list of the step's files. A step that is deleted first loses its name, or COMMIT.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from lingvo_moe.core.files.manifest import ManifestError
from lingvo_moe.core.files.store import LocalStore, Store, open_store

COMMIT = "COMMIT"
LIST = "files.xxh128"  # the list of a step's files with their digests
_STEP = re.compile(r"[0-9]+")
# Names in a directory of steps that are being written or deleted; also of older versions, which Orbax wrote.
_PART = re.compile(r"[0-9]+\.(part|deleted|orbax-checkpoint-tmp.*)")


class SavedSteps:
    """The steps below a directory or an address."""

    def __init__(self, place: str | os.PathLike | Store):
        """Reads and writes nothing. Raises PathError: an address of unknown storage."""
        self.store = place if isinstance(place, Store) else open_store(place)
        self._local = self.store.path if isinstance(self.store, LocalStore) else None

    def Steps(self) -> list[int]:
        """The steps that are complete, ascending; none where there is no such directory. Raises OSError."""
        return sorted(self._Found()[0])

    def Uncommitted(self) -> list[int]:
        """The steps in a bucket that lack nothing but COMMIT, as when a writer is just about to write it."""
        return sorted(self._Found()[1])

    def Has(self, step: int) -> bool:
        """Whether a step is complete. Raises OSError."""
        if self._local is not None:
            return (self._local / str(step)).is_dir()
        return self.Of(step).Has(COMMIT)

    def Of(self, step: int) -> Store:
        """The files of a complete step."""
        return self.store.Below(str(step))

    def Part(self, step: int) -> Store:
        """The place of a step's files until it is complete."""
        return self.store.Below(str(step) if self._local is None else f"{step}.part")

    def Complete(self, step: int, digest: str) -> bool:
        """Makes complete the step whose files are at Part; False where another writer did. Raises OSError.

        `digest` is that of the list of its files.
        """
        if self._local is None:
            # Different for each writer, for it is the digest of files with random names.
            return self.Of(step).Create(COMMIT, digest.encode())
        try:
            os.rename(self._local / f"{step}.part", self._local / str(step))
        except OSError:
            if self.Has(step):
                return False
            raise
        return True

    def CheckCommit(self, step: int, digest: str) -> None:
        """Raises ManifestError where a step was completed with another list of its files than that of a digest."""
        if self._local is not None:
            return
        try:
            found = self.Of(step).Read(COMMIT)
        except FileNotFoundError:
            found = b""
        if found != digest.encode():
            raise ManifestError(f"{COMMIT} was changed or damaged, or is of another list of files")

    def Delete(self, step: int) -> None:
        """Deletes a step. Raises OSError."""
        if self._local is None:
            self.Of(step).Delete(COMMIT)
            self.Of(step).DeleteAll()
            return
        gone = self._local / f"{step}.deleted"
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(self._local / str(step), gone)
        shutil.rmtree(gone)

    def Clear(self) -> list[int]:
        """Deletes what killed writers left; only if nobody writes there. Returns the steps that lacked COMMIT alone."""
        if self._local is None:
            whole, ready, left = self._Found()
            for step in left - whole:
                self.Of(step).DeleteAll()
            return sorted(ready)
        for path in self._Names():
            if _PART.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        return []

    def _Found(self) -> tuple[set[int], set[int], set[int]]:
        """The steps that are complete, those that lack COMMIT alone, and all of which there is something."""
        if self._local is not None:
            names = {int(path.name) for path in self._Names() if _STEP.fullmatch(path.name)}
            return names, set(), names
        found: dict[int, set[str]] = {}
        for name in self.store.List():
            step, _, rest = name.partition("/")
            if _STEP.fullmatch(step):
                found.setdefault(int(step), set()).add(rest)
        whole = {step for step, names in found.items() if COMMIT in names}
        listed = {step for step, names in found.items() if LIST in names}
        return whole, listed - whole, set(found)

    def _Names(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # --restart just moved it
            yield from sorted(self._local.iterdir() if self._local else [])
