"""A list of files of a directory, of all or of some, with their SHA-256: any later change shows, also of the list.

The list has a line `<64 hex digits>  <path>` for each file, as `sha256sum --check` reads it, and a last one with the
digest of the lines before. It tells damage; who can write the directory can write another list, too.

A symbolic link to a file stands for what is in that file. One to a directory is refused, for it may lead in a circle,
and so are pipes and devices, which need not end.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from lingvo_moe.core.files import write_atomic

_LINE = re.compile(rb"([0-9a-f]{64})  ([^\n]+)")
_AGAIN = "copy the directory again, or write it again"


class ManifestError(ValueError):
    """A directory that is not as it was when it was listed. The message names the file and what to do."""


def write_manifest(
    directory: str | os.PathLike, name: str, files: Iterable[str] | None = None
) -> None:
    """Lists the files below `directory`, whole or not at all.

    Args:
        directory: with everything in it that is to be listed.
        name: of the list, a path in `directory`; what lies there is replaced.
        files: which files to list, paths in `directory`; None for all.

    Raises:
        ManifestError: a link to a directory, a pipe or a device.
        ValueError: a file whose name holds a newline.
    """
    lines = []
    for path in sorted(_files(Path(directory)) - {name} if files is None else files):
        if "\n" in path:
            raise ValueError(f"{directory}: a file's name holds a newline: {path!r}")
        lines.append(f"{_digest(Path(directory) / path)}  {path}\n")
    body = "".join(lines).encode("utf-8", "surrogateescape")
    write_atomic(Path(directory) / name, body + _last_line(body))


def verify_manifest(directory: str | os.PathLike, name: str) -> None:
    """Reads every file of `directory`, a piece at a time, and compares it with the list in `name`, which has them all.

    Raises:
        ManifestError: a file was changed, is missing or was added, or the list itself was changed; or as
            write_manifest.
    """
    directory = Path(directory)
    listed = _read_list(directory, name, _AGAIN)
    found = _files(directory) - {name}
    for path in sorted(listed.keys() - found):
        raise ManifestError(f"{directory}: {path} is missing; {_AGAIN}")
    for path in sorted(found - listed.keys()):
        raise ManifestError(f"{directory}: {path} is not in {name}; it does not belong there")
    for path, digest in listed.items():
        if _digest(directory / path) != digest:
            raise _changed(directory, path, name, _AGAIN)


def read_listed(
    directory: str | os.PathLike, name: str, files: Iterable[str], remedy: str = _AGAIN
) -> dict[str, bytes]:
    """The contents of some of the files that a list has, each as it was listed.

    Args:
        directory, name: as write_manifest; the directory may hold files that are not listed.
        files: which to read, paths in `directory`.
        remedy: what to do about a damaged file, for errors.

    Raises:
        ManifestError: a file was changed, is missing or is not listed, or the list itself was changed.
    """
    directory = Path(directory)
    listed = _read_list(directory, name, remedy)
    found = {}
    for path in files:
        if path not in listed:
            raise ManifestError(f"{directory}: {path} is not in {name}; {remedy}")
        if not (directory / path).is_file():
            raise ManifestError(f"{directory}: {path} is missing, or no file; {remedy}")
        found[path] = (directory / path).read_bytes()
        if hashlib.sha256(found[path]).hexdigest() != listed[path]:
            raise _changed(directory, path, name, remedy)
    return found


def _changed(directory: Path, path: str, name: str, remedy: str) -> ManifestError:
    return ManifestError(
        f"{directory}: {path} was changed or damaged (its SHA-256 is not that of {name}); {remedy}"
    )


def _read_list(directory: Path, name: str, remedy: str) -> dict[str, str]:
    """The digest of each path that is listed."""
    damaged = ManifestError(f"{directory}: {name}, the list of files, was changed; {remedy}")
    if not (directory / name).is_file():
        raise ManifestError(f"{directory}: {name}, the list of files, is missing; {remedy}")
    content = (directory / name).read_bytes()
    end = content.rfind(b"\n", 0, -1) + 1
    body = content[:end]
    if content[end:] != _last_line(body):
        raise damaged
    listed = {}
    for line in body.split(b"\n")[:-1]:
        match = _LINE.fullmatch(line)
        if not match:
            raise damaged
        listed[match[2].decode("utf-8", "surrogateescape")] = match[1].decode()
    return listed


def _last_line(body: bytes) -> bytes:
    return f"# the lines above: {hashlib.sha256(body).hexdigest()}\n".encode()


def _files(directory: Path) -> set[str]:
    """Paths of all files, relative, with slashes."""

    def fail(error: OSError) -> None:
        raise error

    found = set()
    for root, directories, files in os.walk(directory, onerror=fail):
        for path in (Path(root, name) for name in (*directories, *files)):
            shown = str(PurePosixPath(path.relative_to(directory)))
            if wrong := _cannot_be_listed(path):
                raise ManifestError(f"{directory}: {shown} {wrong}")
            if path.is_file():
                found.add(shown)
    return found


def _cannot_be_listed(path: Path) -> str:
    """Why not; '' for a file and for a directory."""
    if path.is_symlink() and path.is_dir():
        return "is a symbolic link to a directory; put the directory itself there"
    if path.is_symlink() and not path.exists():
        return f"leads to no file; {_AGAIN}"
    if path.exists() and not path.is_file() and not path.is_dir():
        return "is no file but a pipe or a device; it does not belong there"
    return ""


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
