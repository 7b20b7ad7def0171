"""The checkpoints of a run, one place a step: which are complete, and how one becomes complete at once.

In a directory, a step is written under another name, and renamed. A bucket can rename nothing: a step is complete when
its object COMMIT is there, which is written last, and only if there is none, so that of two writers one is refused. It
holds the digest of the list of the step's files. A step that is deleted first loses its name, or COMMIT.
"""

import abc
import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from lingvo_moe.core.files.manifest import ManifestError
from lingvo_moe.core.files.store import Bucket, LocalStore, Store, open_store

COMMIT = "COMMIT"
LIST = "files.xxh128"  # the list of a step's files with their digests
_STEP = re.compile(r"[0-9]+")
# Names in a directory of steps that are being written or deleted; also of older versions, which Orbax wrote.
_PART = re.compile(r"[0-9]+\.(part|deleted|orbax-checkpoint-tmp.*)")


def saved_steps(place: str | os.PathLike) -> "SavedSteps":
    """The steps below a directory or an address. Reads and writes nothing. Raises PathError: unknown storage."""
    store = open_store(place)
    return StepsInBucket(store) if isinstance(store, Bucket) else StepsOnDisk(Path(place))


class SavedSteps(abc.ABC):
    """The steps below one place. Methods raise OSError where it fails."""

    store: Store

    @abc.abstractmethod
    def Steps(self) -> list[int]:
        """The steps that are complete, ascending; none where there is no such directory."""

    @abc.abstractmethod
    def Uncommitted(self) -> list[int]:
        """The steps in a bucket that lack nothing but COMMIT, as when a writer is just about to write it."""

    @abc.abstractmethod
    def Has(self, step: int) -> bool:
        """Whether a step is complete."""

    def Of(self, step: int) -> Store:
        """The files of a complete step."""
        return self.store.Below(str(step))

    @abc.abstractmethod
    def Part(self, step: int) -> Store:
        """The place of a step's files until it is complete."""

    @abc.abstractmethod
    def Complete(self, step: int, digest: str) -> bool:
        """Makes complete the step whose files are at Part; False where another writer did.

        `digest` is that of the list of its files.
        """

    @abc.abstractmethod
    def CheckCommit(self, step: int, digest: str) -> None:
        """Raises ManifestError where a step was completed with another list of its files than that of a digest."""

    @abc.abstractmethod
    def Delete(self, step: int) -> None:
        """Deletes a step."""

    @abc.abstractmethod
    def Clear(self) -> list[int]:
        """Deletes what killed writers left; only if nobody writes there. Returns the steps that lacked COMMIT alone."""


class StepsOnDisk(SavedSteps):
    """The steps in a directory, which need not be there."""

    def __init__(self, path: Path):
        self.store, self._path = LocalStore(path), path

    def Steps(self) -> list[int]:
        return sorted(int(path.name) for path in self._Names() if _STEP.fullmatch(path.name))

    def Uncommitted(self) -> list[int]:
        return []

    def Has(self, step: int) -> bool:
        return (self._path / str(step)).is_dir()

    def Part(self, step: int) -> Store:
        return self.store.Below(f"{step}.part")

    def Complete(self, step: int, digest: str) -> bool:
        try:
            os.rename(self._path / f"{step}.part", self._path / str(step))
        except OSError:
            if self.Has(step):
                return False
            raise
        return True

    def CheckCommit(self, step: int, digest: str) -> None:
        pass

    def Delete(self, step: int) -> None:
        gone = self._path / f"{step}.deleted"
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(self._path / str(step), gone)
        shutil.rmtree(gone)

    def Clear(self) -> list[int]:
        for path in self._Names():
            if _PART.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        return []

    def _Names(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # --restart just moved it
            yield from sorted(self._path.iterdir())


class StepsInBucket(SavedSteps):
    """The steps at an address."""

    def __init__(self, store: Bucket):
        self.store = self._bucket = store

    def Steps(self) -> list[int]:
        return sorted(step for step, names in self._Found().items() if COMMIT in names)

    def Uncommitted(self) -> list[int]:
        found = self._Found().items()
        return sorted(step for step, names in found if LIST in names and COMMIT not in names)

    def Has(self, step: int) -> bool:
        return self.Of(step).Has(COMMIT)

    def Part(self, step: int) -> Store:
        return self.Of(step)

    def Complete(self, step: int, digest: str) -> bool:
        # Different for each writer, for it is the digest of files with random names.
        return self._bucket.Below(str(step)).Create(COMMIT, digest.encode())

    def CheckCommit(self, step: int, digest: str) -> None:
        try:
            found = self.Of(step).Read(COMMIT)
        except FileNotFoundError:
            found = b""
        if found != digest.encode():
            raise ManifestError(f"{COMMIT} was changed or damaged, or is of another list of files")

    def Delete(self, step: int) -> None:
        self.Of(step).Delete(COMMIT)
        self.Of(step).DeleteAll()

    def Clear(self) -> list[int]:
        ready = self.Uncommitted()
        for step, names in self._Found().items():
            if COMMIT not in names:
                self.Of(step).DeleteAll()
        return ready

    def _Found(self) -> dict[int, set[str]]:
        """The names of the files of each step of which there is something."""
        found: dict[int, set[str]] = {}
        for name in self.store.List():
            step, _, rest = name.partition("/")
            if _STEP.fullmatch(step):
                found.setdefault(int(step), set()).add(rest)
        return found
