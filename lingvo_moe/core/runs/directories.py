"""Recognises the kind of a directory, and so whether something may be written over it, into it or around it.

Every command asks here before it writes. What it replaces must be empty or bear the mark of its own kind. Errors name
the file by which a directory was recognised.
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
    IMPORTING,
    TRAINER,
    find_held_lock,
    is_lock_file,
)


class OutputError(ValueError):
    """A place that must not be written to. The message names the flag, the place and the reason."""


@dataclass(frozen=True)
class OutputKind:
    """A directory that a command makes."""

    name: str  # with its article: 'a run'
    marks: tuple[str, ...]  # files by one of which it is recognised
    parts: tuple[str, ...]  # patterns of the other names that the command puts there

    def FindMark(self, directory: str | os.PathLike) -> str:
        """The evidence that a directory is of this kind, e.g. 'it holds corpus.json'; '' where it is not.

        Raises OSError: as find_held_lock.
        """
        for mark in self.marks:
            if os.path.lexists(os.path.join(directory, mark)):
                return f"it holds {mark}"
        if self is RUN and (lock := find_held_lock(directory)):
            return f"a trainer holds {lock} in it"
        return ""

    def Owns(self, name: str) -> bool:
        """Whether a file or directory of that name, directly in one of these, is part of it."""
        return any(fnmatchcase(name, part) for part in (*self.marks, *self.parts))

    def __str__(self) -> str:
        return self.name


RUN = OutputKind(
    "a run",
    (DESCRIPTION,),
    (
        *("params.txt", "train_params.txt", "program.json", "evaluations.json", "time.jsonl"),
        *("manifest.sha256", "experiment.hmac", "vocab", CHECKPOINTS, IMPORTING, "train"),
        *(f"{TRAINER.file}*", EVALUATOR.file, "published"),
    ),
)
PREPARED = OutputKind(
    "prepared data", ("prepared.json", "prepared.sha256"), ("dev", "vocab", "records", "*.tsv.gz")
)
CORPUS = OutputKind("a corpus", ("corpus.json", "corpus.sha256"), ("dev", "*.tsv.gz"))
EXPORTED = OutputKind(
    "an exported model",
    ("saved_model.pb",),
    ("variables", "assets", "assets.extra", "fingerprint.pb", "keras_metadata.pb"),
)


@dataclass(frozen=True)
class RecognisedDirectory:
    """The kind of a directory, and the reason for saying so."""

    kind: OutputKind  # what the directory is
    why: str  # the evidence, as OutputKind.FindMark says it

    def __str__(self) -> str:
        """The kind and the reason: 'a run (it holds experiment.json)'."""
        return f"{self.kind} ({self.why})"


def recognise(directory: str | os.PathLike) -> RecognisedDirectory | None:
    """Recognises the kind of a directory; None for one of no kind, and for a path that is no directory.

    Raises OSError: as OutputKind.FindMark.
    """
    for kind in (RUN, PREPARED, CORPUS, EXPORTED):
        if why := kind.FindMark(directory):
            return RecognisedDirectory(kind, why)
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
        foreign = [n for n in open_store(output).List() if not kind.Owns(n.partition("/")[0])]
    else:
        path = Path(output)
        if path.exists() and not path.is_dir():
            raise OutputError(f"{flag}={output} is a file; name a directory")
        check_beside(path, flag)
        if not path.exists():
            return
        if path.samefile(Path.cwd()):
            raise OutputError(f"{flag}={output} is the directory that you are in; name another one")
        there = recognise(path)
        if there and there.kind is not kind:
            raise OutputError(f"{flag}={output} is {there}; name an empty or new directory")
        # A killed trainer's lock file does not matter: recognise saw that nobody holds it.
        names = sorted(p.name for p in path.iterdir() if not is_lock_file(p.name))
        foreign = [name for name in names if not (there and kind.Owns(name))]
    if foreign:
        raise OutputError(
            f"{flag}={output} holds {foreign[0]!r}, which is no part of {kind} and would be lost; move it away, or "
            "name an empty or new directory"
        )


def check_beside(output: str | os.PathLike, flag: str) -> None:
    """Accepts a directory that a command makes or owns, unless it lies inside a run, data or an exported model.

    Raises OutputError: it does.
    """
    for directory, around in _around(output):
        raise OutputError(
            f"{flag}={output} lies inside {directory}, which is {around}; name a directory outside of it"
        )


def check_addable(path: str | os.PathLike, flag: str) -> None:
    """Accepts a file, or a directory of files, that a command adds to what is there: a report in a run is fine.

    Raises OutputError: it would change a part of a run, or anything in data or an exported model.
    """
    real = Path(os.path.realpath(path))
    if real.is_dir() and (there := recognise(real)):
        raise OutputError(f"{flag}={path} is {there}; name another directory")
    for directory, around in _around(real):
        if around.kind is not RUN or RUN.Owns(real.relative_to(directory).parts[0]):
            raise OutputError(
                f"{flag}={path} would change {directory}, which is {around}; name another place"
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
    there = recognise(real)
    if there and there.kind is not RUN:
        raise OutputError(
            f"--logdir={logdir} is {there}, which a run would damage; name a new directory"
        )
    check_beside(logdir, "--logdir")
    if there or not real.is_dir():
        return
    for child in sorted(real.iterdir()):
        if inside := recognise(child):
            raise OutputError(
                f"--logdir={logdir} holds {child.name}, which is {inside}; --restart would move it away with the "
                "run: name a directory of the run's own"
            )


def _around(path: str | os.PathLike) -> Iterator[tuple[Path, RecognisedDirectory]]:
    """The directories of a kind that a path lies in, innermost first."""
    for directory in Path(os.path.realpath(path)).parents:
        if around := recognise(directory):
            yield directory, around
