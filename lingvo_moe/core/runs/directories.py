"""Recognises the kind of a directory, and so whether something may be written over it, into it or around it.

Every command asks here before it writes: a run is its trainer's, a manifest lists all files of an exported model, and
data is known by the files that are there. Errors name the file by which a directory was recognised.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lingvo_moe.core.files.store import is_address, open_store
from lingvo_moe.core.runs.run_lock import (
    CHECKPOINTS,
    DESCRIPTION,
    EVALUATOR,
    TRAINER,
    find_held_lock,
    is_lock_file,
)


class OutputError(ValueError):
    """A place that must not be written to. The message names the flag, the place and the reason."""


@dataclass(frozen=True)
class OutputKind:
    """A directory that a command makes."""

    name: str  # what errors call it
    marks: tuple[str, ...]  # files by one of which it is known
    parts: tuple[str, ...]  # patterns of names; all that the command puts there
    # Patterns of names that it would be changed by, although the command puts none there.
    reads: tuple[str, ...] = ()
    closed: bool = False  # whether it is changed by any file that is added
    # Names; a mark counts only where one of them is there, too. Empty for marks that count alone.
    beside: tuple[str, ...] = ()

    def FindMark(self, directory: str | os.PathLike) -> str:
        """The evidence that a directory is of this kind, e.g. 'it holds corpus.json'; '' where it is not.

        Raises OSError: as find_held_lock.
        """

        def has(name: str) -> bool:
            return os.path.lexists(os.path.join(directory, name))

        if not self.beside or any(map(has, self.beside)):
            for mark in filter(has, self.marks):
                return f"it holds {mark}"
        if self is RUN and (lock := find_held_lock(directory)):
            return f"a trainer holds {lock} in it"
        return ""

    def Owns(self, name: str) -> bool:
        """Whether a file or directory of that name, directly in one of these, is part of it."""
        return any(fnmatchcase(name, part) for part in (*self.marks, *self.parts))

    def ChangedBy(self, name: str) -> bool:
        """Whether a file or directory of that name, written directly into one of these, would change it."""
        return self.closed or self.Owns(name) or any(fnmatchcase(name, part) for part in self.reads)

    def __str__(self) -> str:
        """The kind with its article: 'a run'."""
        if self is PREPARED:
            return self.name
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


# Other programs write an experiment.json, too. Old runs have no manifest, but checkpoints.
RUN = OutputKind(
    "run",
    (DESCRIPTION,),
    (
        "params.txt",
        "train_params.txt",
        "program.json",
        "evaluations.json",
        "time.jsonl",
        "manifest.sha256",
        "experiment.hmac",
        "vocab",
        CHECKPOINTS,
        "train",
        f"{TRAINER.file}*",
        EVALUATOR.file,
    ),
    beside=("manifest.sha256", CHECKPOINTS),
)
PREPARED = OutputKind(
    "prepared data",
    ("prepared.json", "prepared.sha256"),
    ("dev", "vocab", "records", "*.tsv.gz"),
    ("*.tsv",),
)
CORPUS = OutputKind("corpus", ("corpus.json", "corpus.sha256"), ("dev", "*.tsv.gz"), ("*.tsv",))
EXPORTED = OutputKind(
    "exported model",
    ("saved_model.pb",),
    ("variables", "assets", "assets.extra", "fingerprint.pb", "keras_metadata.pb"),
    closed=True,
)
_KINDS = (RUN, PREPARED, CORPUS, EXPORTED)


@dataclass(frozen=True)
class Found:
    """The kind of a directory, and the reason for saying so."""

    kind: OutputKind  # which kind of directory
    why: str  # by what it was recognised, as OutputKind.FindMark says it

    def __str__(self) -> str:
        """The kind and the reason: 'a run (it holds experiment.json)'."""
        return f"{self.kind} ({self.why})"


def recognise(directory: str | os.PathLike) -> Found | None:
    """Recognises the kind of a directory; None for one of no kind, and for a path that is no directory.

    Raises OSError: as OutputKind.FindMark.
    """
    for kind in _KINDS:
        if why := kind.FindMark(directory):
            return Found(kind, why)
    return None


def check_writable(directory: str | os.PathLike, what: str) -> None:
    """Accepts a directory in which a file can be made, or that can be made.

    `what` named it, for the message: '--output=DIR'.

    Raises:
        OutputError: nothing can be written there, e.g. in /proc.
    """
    place = Path(os.path.realpath(directory))
    while not place.exists() and not place.is_symlink() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise OutputError(f"{what}: {place} is not a directory")
    try:
        if os.access(place, os.W_OK | os.X_OK):
            tempfile.TemporaryFile(dir=place).close()
            return
    except OSError:
        pass
    raise OutputError(f"{what}: no permission to write in {place}")


def check_replaceable(output: str | os.PathLike, kind: OutputKind, flag: str = "--output") -> None:
    """Accepts a directory, or an address, that a command makes, and by which it replaces an older one of its kind.

    Raises OutputError: what is there, or around it, is something else, or would be lost.
    """
    if is_address(output):
        others = [n for n in open_store(output).List() if not kind.Owns(n.partition("/")[0])]
        if others:
            raise OutputError(
                f"{flag}={output} holds {others[0]!r}, which is no part of {kind}; name another place"
            )
        return
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{flag}={output} is a file; name a directory")
    check_beside(path, flag)
    if not path.exists():
        return
    if path.samefile(Path.cwd()):
        raise OutputError(f"{flag}={output} is the directory that you are in; name another one")
    found = recognise(path)
    if found and found.kind is not kind:
        raise OutputError(f"{flag}={output} is {found}; name an empty or new directory")
    # A killed trainer's lock file does not matter: that nobody holds it was just seen.
    there = sorted(p.name for p in path.iterdir() if not is_lock_file(p.name))
    if there and not found:
        raise OutputError(
            f"{flag}={output} holds files that are no {kind.name}; name an empty or new directory"
        )
    for name in there:
        if not kind.Owns(name):
            raise OutputError(
                f"{flag}={output}: {name!r} is no part of the {kind.name} there and would be lost with it; move it "
                "away, or name another directory"
            )


def check_beside(output: str | os.PathLike, flag: str) -> None:
    """Accepts a directory that a command makes or owns, unless it lies inside a run, data or an exported model.

    Raises OutputError: it does.
    """
    for directory, found in _around(output):
        raise OutputError(
            f"{flag}={output} lies inside {directory}, which is {found}; name a directory outside of it"
        )


def check_addable(path: str | os.PathLike, flag: str) -> None:
    """Accepts a file, or a directory of files, that a command adds to what is there: a report in a run is fine.

    Raises OutputError: it would change a run, data or an exported model.
    """
    real = Path(os.path.realpath(path))
    if real.is_dir() and (found := recognise(real)):
        raise OutputError(f"{flag}={path} is {found}; name another directory")
    for directory, found in _around(real):
        if found.kind.ChangedBy(real.relative_to(directory).parts[0]):
            raise OutputError(
                f"{flag}={path} would change {directory}, which is {found}; name another place"
            )


def check_logdir(logdir: str | os.PathLike, inputs: Mapping[str, str | os.PathLike]) -> None:
    """Accepts the directory of a run: new, empty, one that holds a run, or one with other files only.

    `inputs` is what the run reads, by flag.

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
    found = recognise(real)
    if found and found.kind is not RUN:
        raise OutputError(
            f"--logdir={logdir} is {found}, which a run would damage; name a new directory"
        )
    check_beside(logdir, "--logdir")
    if found or not real.is_dir():
        return
    for child in sorted(real.iterdir()):
        if inside := recognise(child):
            raise OutputError(
                f"--logdir={logdir} holds {child.name}, which is {inside}; --restart would move it away with the "
                "run: name a directory of the run's own"
            )


def _around(path: str | os.PathLike) -> Iterator[tuple[Path, Found]]:
    """The directories that a path lies in which are something, innermost first."""
    for directory in Path(os.path.realpath(path)).parents:
        if found := recognise(directory):
            yield directory, found
