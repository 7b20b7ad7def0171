"""Single damages to files, by seed: a flipped bit, a cut, a deletion, a swap with another of its kind; a full disk.

Example:
    for damage in damages(sorted(directory.rglob("*.model")), count=100, seed=0):
        damage.Apply()
        try:
            ...  # what reads the files: it must say so, and name damage.path
        finally:
            damage.Undo()
"""

import contextlib
import dataclasses
import os
import random
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

KINDS = ("flip", "cut", "delete", "swap")


@dataclasses.dataclass
class Damage:
    """One damage; it does nothing before Apply.

    Attributes:
        kind: one of KINDS.
        path: the file that is damaged; or what has a path's methods, such as an object in a bucket.
        other: for a swap, the file that `path` changes contents with; else None.
        where: for a flip and a cut, where in the file, as a share of its length: 0 <= where < 1.
        bit: for a flip, which bit of the byte.
    """

    kind: str
    path: Path
    other: Path | None = None
    where: float = 0.0
    bit: int = 0
    _before: dict[Path, tuple[bytes, os.stat_result]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def Apply(self) -> None:
        """Damages the file. Its modification time stays, as when a disk fails."""
        for path in (self.path, self.other) if self.other else (self.path,):
            self._before[path] = path.read_bytes(), path.stat()
        content, stat = self._before[self.path]
        at = int(self.where * len(content))
        if self.kind == "delete":
            self.path.unlink()
        elif self.kind == "cut":
            _write(self.path, content[:at], stat)
        elif self.kind == "flip":
            flipped = bytes([content[at] ^ 1 << self.bit])
            _write(self.path, content[:at] + flipped + content[at + 1 :], stat)
        else:
            assert self.other is not None
            other_content, other_stat = self._before[self.other]
            _write(self.path, other_content, stat)
            _write(self.other, content, other_stat)

    def Undo(self) -> None:
        """Restores bytes, mode and times, whatever happened to the files since Apply."""
        for path, (content, stat) in self._before.items():
            if isinstance(path, Path):
                path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, content, stat)
        self._before.clear()

    def __str__(self) -> str:
        about = {"flip": f" bit {self.bit} at {self.where:.4f}", "cut": f" to {self.where:.4f}"}
        extra = f" with {self.other}" if self.other else about.get(self.kind, "")
        return f"{self.kind} {self.path}{extra}"


def damages(files: Sequence[Path], count: int, seed: int) -> Iterator[Damage]:
    """Yields `count` damages, each of one of `files`, kinds in turn.

    A swap is with another of `files` that has the same suffix and other contents; a file without such a one, and an
    empty file, get another kind.

    Args:
        files: as they are before the first damage; Undo each before the next is applied.
        count: how many.
        seed: the same seed gives the same damages for the same files.
    """
    rng = random.Random(seed)
    contents = {path: path.read_bytes() for path in files}
    if not contents:
        raise ValueError("no files to damage")
    partners = {
        path: [
            other for other in files if other.suffix == path.suffix and contents[other] != content
        ]
        for path, content in contents.items()
    }
    empty = {path for path, content in contents.items() if not content}
    contents.clear()
    for number in range(count):
        path = rng.choice(files)
        kind = KINDS[number % len(KINDS)]
        if kind == "swap" and not partners[path]:
            kind = "flip"
        if kind in ("flip", "cut") and path in empty:
            kind = "delete"
        other = rng.choice(partners[path]) if kind == "swap" else None
        yield Damage(kind, path, other, rng.random(), rng.randrange(8))


@contextlib.contextmanager
def full_disk(free: int) -> Iterator[None]:
    """Lets no file of this process grow beyond `free` bytes: like a full disk, except for the error number (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _write(path: Path, content: bytes, stat: os.stat_result) -> None:
    """Replaces a file, so that open or mapped files keep the old contents; or an object in a bucket."""
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    temp = path.with_name(f".{path.name}.damage")
    temp.write_bytes(content)
    temp.chmod(stat.st_mode & 0o7777)
    os.replace(temp, path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
