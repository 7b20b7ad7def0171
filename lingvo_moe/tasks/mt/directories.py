"""What a directory is, and so whether something may be written over it, into it or around it.

Every command asks here before it writes: a run is its trainer's, a manifest lists all files of an exported model, and
data is known by the files that are there.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lingvo_moe.core.run_lock import LOCK_FILE


class OutputError(ValueError):
    """A place that must not be written to. The message names the flag, the place and the reason."""


@dataclass(frozen=True)
class Kind:
    """A directory that a command makes.

    Attributes:
        name: what errors call it.
        marks: files by one of which it is known.
        parts: patterns of names; all that the command puts there.
        reads: patterns of names that it would be changed by, although the command puts none there.
        closed: whether it is changed by any file that is added.
    """

    name: str
    marks: tuple[str, ...]
    parts: tuple[str, ...]
    reads: tuple[str, ...] = ()
    closed: bool = False

    def Owns(self, name: str) -> bool:
        """Whether a file or directory of that name, directly in one of these, is part of it."""
        return any(fnmatchcase(name, part) for part in (*self.marks, *self.parts))

    def ChangedBy(self, name: str) -> bool:
        """Whether a file or directory of that name, written directly into one of these, would change it."""
        return self.closed or self.Owns(name) or any(fnmatchcase(name, part) for part in self.reads)

    def __str__(self) -> str:
        """As a sentence has it: 'a run'."""
        return (
            self.name
            if self is PREPARED
            else f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"
        )


RUN = Kind(
    "run",
    ("experiment.json", LOCK_FILE),
    (
        "params.txt",
        "program.json",
        "manifest.sha256",
        "vocab",
        "checkpoints",
        "train",
        f"{LOCK_FILE}*",
    ),
)
PREPARED = Kind(
    "prepared data",
    ("prepared.json", "prepared.sha256"),
    ("dev", "vocab", "records", "*.tsv.gz"),
    ("*.tsv",),
)
CORPUS = Kind("corpus", ("corpus.json", "corpus.sha256"), ("dev", "*.tsv.gz"), ("*.tsv",))
EXPORTED = Kind(
    "exported model",
    ("saved_model.pb",),
    ("variables", "assets", "assets.extra", "fingerprint.pb", "keras_metadata.pb"),
    closed=True,
)
_KINDS = (RUN, PREPARED, CORPUS, EXPORTED)


def kind_of(directory: str | os.PathLike) -> Kind | None:
    """What a directory is; None for any other, and for what is none."""
    for kind in _KINDS:
        if any(os.path.lexists(os.path.join(directory, mark)) for mark in kind.marks):
            return kind
    return None


def check_replaceable(output: str | os.PathLike, kind: Kind, flag: str = "--output") -> None:
    """Accepts a directory that a command makes, and by which it replaces an older one of its kind.

    Raises:
        OutputError: what is there, or around it, is something else, or would be lost.
    """
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{flag}={output} is a file; name a directory")
    check_beside(path, flag)
    if not path.exists():
        return
    if path.samefile(Path.cwd()):
        raise OutputError(f"{flag}={output} is the directory that you are in; name another one")
    there = sorted(p.name for p in path.iterdir())
    if not there:
        return
    found = kind_of(path)
    if found is not kind:
        what = found or f"files that are no {kind.name}"
        raise OutputError(f"{flag}={output} holds {what}; name an empty or new directory")
    for name in there:
        if not kind.Owns(name):
            raise OutputError(
                f"{flag}={output}: {name!r} is no part of the {kind.name} there and would be lost with it; move it "
                "away, or name another directory"
            )


def check_beside(output: str | os.PathLike, flag: str) -> None:
    """Accepts a directory that a command makes or owns, unless it lies inside a run, data or an exported model.

    Raises:
        OutputError: it does.
    """
    for directory, kind in _around(output):
        raise OutputError(
            f"{flag}={output} lies inside {directory}, which is {kind}; name a directory outside of it"
        )


def check_addable(path: str | os.PathLike, flag: str) -> None:
    """Accepts a file, or a directory of files, that a command adds to what is there: a report in a run is fine.

    Raises:
        OutputError: it would change a run, data or an exported model.
    """
    real = Path(os.path.realpath(path))
    if real.is_dir() and (kind := kind_of(real)):
        raise OutputError(f"{flag}={path} is {kind}; name another directory")
    for directory, kind in _around(real):
        if kind.ChangedBy(real.relative_to(directory).parts[0]):
            raise OutputError(
                f"{flag}={path} would change {directory}, which is {kind}; name another place"
            )


def check_logdir(logdir: str | os.PathLike, inputs: Mapping[str, str | os.PathLike]) -> None:
    """Accepts the directory of a run: new, empty, one that holds a run, or one with other files only.

    Args:
        logdir: the value of --logdir.
        inputs: what the run reads, by flag.

    Raises:
        OutputError: it is, lies in, or holds what the run reads, other data, another run or an exported model.
    """
    real = Path(os.path.realpath(logdir))
    for flag, path in inputs.items():
        other = Path(os.path.realpath(path))
        how = ""
        if other == real:
            how = "is also"
        elif other in real.parents:
            how = "lies inside"
        elif real in other.parents:
            how = "holds"
        if how:
            raise OutputError(
                f"--logdir={logdir} {how} {flag}={path}; a run needs a directory of its own"
            )
    found = kind_of(real)
    if found not in (None, RUN):
        raise OutputError(
            f"--logdir={logdir} is {found}, which a run would damage; name a new directory"
        )
    check_beside(logdir, "--logdir")
    if found is RUN or not real.is_dir():
        return
    for child in sorted(real.iterdir()):
        if inside := kind_of(child):
            raise OutputError(
                f"--logdir={logdir} holds {child.name}, which is {inside}; --restart would move it away with the "
                "run: name a directory of the run's own"
            )


def _around(path: str | os.PathLike) -> Iterator[tuple[Path, Kind]]:
    """The directories that a path lies in which are something, innermost first."""
    for directory in Path(os.path.realpath(path)).parents:
        if kind := kind_of(directory):
            yield directory, kind
