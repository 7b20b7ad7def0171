"""Verifies files that tools wrote against the list of SHA-256 beside them (core/files/manifest.py).

tools.prepare lists its data set in `prepared.sha256` and tools.build_corpus its corpus in `corpus.sha256`; a vocabulary
that lies by itself has `<file>.sha256`. Files of such a directory are verified before they are read. A
directory made by hand needs no list.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.files import manifest
from lingvo_moe.core.files.copies import kept_copy
from lingvo_moe.core.files.files import write_atomic
from lingvo_moe.core.files.store import is_address
from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.tidying import TIDIED

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListKind:
    """The list of files that one kind of data directory has."""

    summary: str  # the file that describes it; `"list"` there names the list
    name: str  # the list
    tool: str  # what makes it

    @property
    def remedy(self) -> str:
        return f"run {self.tool} again, or delete {self.summary} and {self.name} to use the files as they are"

    def Write(self, directory: Path) -> None:
        """Lists all files of a finished directory. Raises as write_manifest."""
        manifest.write_manifest(directory, self.name)


PREPARED_LIST = ListKind("prepared.json", "prepared.sha256", "tools.prepare")
CORPUS_LIST = ListKind("corpus.json", "corpus.sha256", "tools.build_corpus")
LIST_KINDS = (PREPARED_LIST, CORPUS_LIST)


@dataclass(frozen=True)
class FileList:
    """The list of a data directory, whose own checksum was verified."""

    directory: Path  # where it lies
    kind: ListKind  # what made it
    paths: frozenset[str]  # all that are listed, with slashes

    @classmethod
    def Open(cls, directory: str | os.PathLike) -> "FileList | None":
        """The list of a directory, with its summary verified; None for a directory that no tool listed.

        Raises DataError: the list or the summary is damaged, or one of the two is missing.
        """
        directory = Path(directory)
        for kind in LIST_KINDS:
            if not ((directory / kind.name).is_file() or _says_it_is_listed(directory, kind)):
                continue
            with _data_errors():
                paths = manifest.read_manifest(directory, kind.name, kind.remedy)
            opened = cls(directory, kind, frozenset(paths))
            opened.Verify([kind.summary])
            return opened
        return None

    @property
    def tidied(self) -> int:
        """The version of tidy_text that the texts went through. Raises DataError: a later one."""
        path = self.directory / self.kind.summary
        version = json.loads(path.read_bytes()).get("tidied", 1)
        return check_tidied(version, path)

    def Verify(self, paths: Iterable[str | os.PathLike]) -> None:
        """Reads files, given as paths in the directory or with it in front, and compares them with the list.

        Raises DataError: one is damaged, missing, or not of the list.
        """
        names = [self._name(path) for path in paths]
        with _data_errors():
            manifest.verify_manifest(self.directory, self.kind.name, names, self.kind.remedy)

    def CheckLanguages(self, files: Iterable[Path], folder: str = "") -> None:
        """Raises DataError unless these are the TSVs of a folder that are listed: none was added or removed.

        `folder` is '' or 'dev'.
        """
        listed = {p for p in self.paths if os.path.dirname(p) == folder and tsv.language_of(p)}
        present = {self._name(path) for path in files}
        for path in sorted(listed ^ present):
            what = "was removed" if path in listed else "was added"
            raise DataError(
                f"{self.directory}: {path} {what} after {self.kind.tool} made the data; {self.kind.remedy}"
            )

    def _name(self, path: str | os.PathLike) -> str:
        path = Path(path)
        below = path.relative_to(self.directory) if path.is_relative_to(self.directory) else path
        return below.as_posix()


def check_tidied(version: Any, where: str | os.PathLike) -> int:
    """A version of tidy_text that a file names; 0: none. Raises DataError: there is no such version here."""
    if version not in range(TIDIED + 1):
        raise DataError(
            f"{where}: its texts were tidied by version {version!r}; {TIDIED} is the latest here: it is damaged, or of"
            " a later version of lingvo_moe"
        )
    return int(version)


def local_data(data_dir: str | os.PathLike) -> Path:
    """A directory of data; of an address a copy on this machine, of data that a tool has listed. Raises DataError."""
    if not is_address(data_dir):
        return Path(data_dir)
    with _data_errors():
        return kept_copy(os.fspath(data_dir), tuple(kind.name for kind in LIST_KINDS))


def data_files(
    data_dir: str | os.PathLike, folder: str = "", texts: bool = False
) -> tuple[dict[str, Path], FileList | None]:
    """`({lang: file}, list)` of a data directory, or of its `dev`; the list is None where no tool listed it.

    `texts` as of tsv.language_files.

    Raises DataError: as tsv.language_files; or files were added to or removed from what is listed.
    """
    listed = FileList.Open(data_dir)
    files = tsv.language_files(Path(data_dir) / folder, texts)
    if listed:
        listed.CheckLanguages(files.values(), folder)
    return files, listed


def check_languages(
    directory: str | os.PathLike, languages: Iterable[str], files: Iterable[str]
) -> None:
    """Raises DataError for the first of the languages that is none of those with a file in the directory."""
    files = list(files)
    for lang in languages:
        if lang not in files:
            raise DataError(f"{directory} has no language {lang!r}{did_you_mean(lang, files)}")


def write_listed(path: Path, data: bytes) -> None:
    """Writes a file atomically, and `<path>.sha256` beside it. Raises OSError."""
    write_atomic(path, data)
    manifest.write_manifest(path.parent, list_of(path).name, [path.name])


def list_of(path: Path) -> Path:
    """The path of the list of a single file."""
    return path.with_name(f"{path.name}.sha256")


def verify_listed(path: Path, remedy: str) -> None:
    """Raises DataError, with what to do, unless a file is as write_listed wrote it."""
    with _data_errors():
        manifest.verify_manifest(path.parent, list_of(path).name, [path.name], remedy)


def verify_where_listed(
    directory: str | os.PathLike, name: str, paths: Iterable[str], tool: str, warn: bool = True
) -> None:
    """Verifies files that may have been listed by a tool; without a list there is a warning.

    `name` is the list in `directory` and `tool` writes such lists; `warn` is False for further files of a list that
    was looked for before.

    Raises:
        DataError: a file or the list is damaged; it is named.
    """
    if not (Path(directory) / name).is_file():
        if warn:
            _log.warning(
                "%s: there is no %s, so damage to the files that it lists cannot be noticed; %s writes one",
                directory,
                name,
                tool,
            )
        return
    with _data_errors():
        manifest.verify_manifest(directory, name, paths, f"run {tool} again")


@contextlib.contextmanager
def _data_errors() -> Iterator[None]:
    """Turns a ManifestError into a DataError with the same message."""
    try:
        yield
    except manifest.ManifestError as e:
        raise DataError(str(e)) from e


def _says_it_is_listed(directory: Path, kind: ListKind) -> bool:
    """Whether the summary names the list; a summary that cannot be read may have named one."""
    path = directory / kind.summary
    if kind is PREPARED_LIST:  # the name is ours alone, and an older one has no list
        return path.is_file()
    try:
        return json.loads(path.read_bytes()).get("list") == kind.name
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
