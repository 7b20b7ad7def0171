"""The checkpoints of a run, one place a step: which are complete, and how one becomes complete at once.

In a directory, a step is written under another name, and renamed. A bucket can rename nothing: each writer writes the
files of a step below a name of its own, and then the object COMMIT of the step, which names that writer and has the
digest of the list of the files. COMMIT is only written where there is none, so that of two writers one is refused; one
that leads to no file counts as none. It is by a writer that was taken for dead, whose files were deleted, and that
went on. A step that is deleted first loses its name, or COMMIT.
"""

import abc
import contextlib
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from lingvo_moe.core.files.manifest import ManifestError
from lingvo_moe.core.files.store import Bucket, LocalStore, Store, open_store

COMMIT = "COMMIT"
LIST = "files.xxh128"  # the list of a step's files with their digests
_COMMIT = re.compile(rb"([0-9a-f]{64})(?: ([0-9a-f]{32}) [0-9a-f]{8})?")
_STEP = re.compile(r"[0-9]+")
# Names in a directory of steps that are being written or deleted; also of older versions, which Orbax wrote.
_PART = re.compile(r"[0-9]+\.(part|deleted|orbax-checkpoint-tmp.*)")


def saved_steps(place: str | os.PathLike) -> "SavedSteps":
    """The steps below a directory or an address. Reads and writes nothing. Raises PathError: unknown storage."""
    store = open_store(place)
    return StepsInBucket(store) if isinstance(store, Bucket) else StepsOnDisk(Path(place))


class SavedSteps(abc.ABC):
    """The steps below one place. Methods raise OSError where it fails.

    Attributes:
        store: the place.
        writer: 32 random hex digits, below which files are written in a bucket; the same in all processes of a job.
    """

    store: Store

    def __init__(self, store: Store):
        self.store, self.writer = store, secrets.token_hex(16)

    @abc.abstractmethod
    def Steps(self) -> list[int]:
        """The steps that are complete, ascending; none where there is no such directory."""

    @abc.abstractmethod
    def Uncommitted(self) -> list[int]:
        """The steps in a bucket that lack nothing but COMMIT, as when a writer is just about to write it."""

    @abc.abstractmethod
    def Has(self, step: int) -> bool:
        """Whether a step is complete."""

    def Place(self, step: int) -> Store:
        """All that belongs to a step."""
        return self.store.Below(str(step))

    def Of(self, step: int) -> Store:
        """The files of a complete step. Raises ManifestError: what leads to them is damaged."""
        return self.Place(step)

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
    def Leftovers(self) -> list[str]:
        """The names below which killed writers, if nobody writes there, left what is no part of a complete step."""

    @abc.abstractmethod
    def Clear(self, leftovers: Collection[str]) -> None:
        """Deletes leftovers."""


class StepsOnDisk(SavedSteps):
    """The steps in a directory, which need not be there."""

    def __init__(self, path: Path):
        super().__init__(LocalStore(path))
        self._path = path

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

    def Leftovers(self) -> list[str]:
        return [path.name for path in self._Names() if _PART.fullmatch(path.name)]

    def Clear(self, leftovers: Collection[str]) -> None:
        for name in leftovers:
            shutil.rmtree(self._path / name, ignore_errors=True)

    def _Names(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # --restart just moved it
            yield from sorted(self._path.iterdir())


class Commit(NamedTuple):
    """The content of an object COMMIT; of older versions the digest alone."""

    digest: str  # the digest of the list of the step's files; '' where the object is damaged
    writer: str  # below whose name they are; '': in the step itself

    @classmethod
    def Of(cls, step: int, content: bytes) -> "Commit":
        """Reads the object of a step."""
        match = _COMMIT.fullmatch(content)
        commit = cls(match[1].decode(), (match[2] or b"").decode()) if match else cls("", "")
        return commit if not commit.writer or commit.ToBytes(step) == content else cls("", "")

    def ToBytes(self, step: int) -> bytes:
        """The object of a step, with a checksum."""
        body = f"{self.digest} {self.writer}"
        return f"{body} {zlib.crc32(f'{step} {body}'.encode()):08x}".encode()

    def Leads(self, names: Collection[str]) -> bool:
        """Whether the files are among these names in the step; so it counts where they were or it is damaged, too."""
        return not self.writer or any(name.startswith(f"{self.writer}/") for name in names)


class StepsInBucket(SavedSteps):
    """The steps at an address."""

    def __init__(self, store: Bucket):
        super().__init__(store)
        self._bucket = store

    def Steps(self) -> list[int]:
        return sorted(s for s, names in self._Found().items() if self._Commit(s, names))

    def Uncommitted(self) -> list[int]:
        items = self._Found().items()
        listed = ((s, names) for s, names in items if any(Path(n).name == LIST for n in names))
        return sorted(s for s, names in listed if not self._Commit(s, names))

    def Has(self, step: int) -> bool:
        return self._Commit(step, self.Place(step).List()) is not None

    def Of(self, step: int) -> Store:
        commit = self._Read(step)
        if commit and not commit.digest:
            raise ManifestError(f"{self.Place(step).address}: {COMMIT} was changed or damaged")
        return (
            self.Place(step).Below(commit.writer) if commit and commit.writer else self.Place(step)
        )

    def Part(self, step: int) -> Store:
        return self.Place(step).Below(self.writer)

    def Complete(self, step: int, digest: str) -> bool:
        name, content = f"{step}/{COMMIT}", Commit(digest, self.writer).ToBytes(step)
        while True:
            there = self._bucket.Version(name)
            if there.value is not None and self._Leads(step, there.value):
                return False
            if self._bucket.Replace(name, content, there.generation):
                return True

    def _Leads(self, step: int, commit: bytes) -> bool:
        return Commit.Of(step, commit).Leads(self.Place(step).List())

    def CheckCommit(self, step: int, digest: str) -> None:
        commit = self._Read(step)
        if commit is None or commit.digest != digest:
            raise ManifestError(f"{COMMIT} was changed or damaged, or is of another list of files")

    def Delete(self, step: int) -> None:
        self.Place(step).Delete(COMMIT)
        self.Place(step).DeleteAll()

    def Leftovers(self) -> list[str]:
        left = list[str]()
        for step, names in self._Found().items():
            commit = self._Commit(step, names)
            if commit is None or commit.writer:
                parts = {name.partition("/")[0] for name in names}
                # COMMIT that leads nowhere stays: whoever comes next may have replaced it when this writer deletes.
                left += (f"{step}/{p}" for p in parts - {COMMIT, commit.writer if commit else ""})
        return left

    def Clear(self, leftovers: Collection[str]) -> None:
        for name in leftovers:
            self.store.Delete(name)
            self.store.Below(name).DeleteAll()

    def _Commit(self, step: int, names: Collection[str]) -> Commit | None:
        """The content of COMMIT of a complete step, in which there are these files; None for any other step."""
        commit = self._Read(step) if COMMIT in names else None
        return commit if commit and commit.Leads(names) else None

    def _Read(self, step: int) -> Commit | None:
        """The content of COMMIT of a step; None where there is none."""
        content = self._bucket.Version(f"{step}/{COMMIT}").value
        return None if content is None else Commit.Of(step, content)

    def _Found(self) -> dict[int, set[str]]:
        """The names of the files of each step of which there is something."""
        names: dict[int, set[str]] = {}
        for name in self.store.List():
            step, _, rest = name.partition("/")
            if _STEP.fullmatch(step):
                names.setdefault(int(step), set()).add(rest)
        return names
