"""A list of a directory's files with their SHA-256: any later change shows, one of the list included.

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
    """Lists files below `directory`; the list is written whole or not at all.

    Args:
        directory: with everything in it that is to be listed.
        name: of the list, a path in `directory`; what lies there is replaced.
        files: which to list, as paths in `directory` with slashes; None for all.

    Raises:
        ManifestError: a link to a directory, a pipe or a device.
        ValueError: a file whose name holds a newline.
        OSError: a file cannot be read, or the list cannot be written.
    """
    directory = Path(directory)
    lines = []
    for path in sorted((_files(directory) if files is None else set(files)) - {name}):
        if "\n" in path:
            raise ValueError(f"{directory}: a file's name holds a newline: {path!r}")
        lines.append(f"{_digest(directory / path)}  {path}\n")
    body = "".join(lines).encode("utf-8", "surrogateescape")
    write_atomic(directory / name, body + _last_line(body))


def verify_manifest(
    directory: str | os.PathLike,
    name: str,
    files: Iterable[str] | None = None,
    remedy: str = _AGAIN,
) -> None:
    """Reads files of `directory`, a piece at a time, and compares them with the list in `name`.

    Args:
        directory: as write_manifest had it.
        name: of the list.
        files: which to verify, as paths in `directory` with slashes; None for all, and nothing else may be there.
        remedy: what to do about a damaged file, for the message.

    Raises:
        ManifestError: a file was changed, is missing or is not listed, or the list itself was changed; or as
            write_manifest.
        OSError: a file cannot be read.
    """
    directory = Path(directory)
    listed = read_manifest(directory, name, remedy)
    if files is None:
        found, wanted = _files(directory) - {name}, set(listed)
    else:
        wanted = set(files)
        found = {path for path in wanted if (directory / path).exists()}
    for path in sorted(wanted - found):
        raise ManifestError(f"{directory}: {path} is missing ({name} lists it); {remedy}")
    for path in sorted(found - listed.keys()):
        raise ManifestError(f"{directory}: {path} is not in {name}; it does not belong there")
    for path in sorted(wanted):
        if wrong := _cannot_be_listed(directory / path):
            raise ManifestError(f"{directory}: {path} {wrong}")
        if _digest(directory / path) != listed[path]:
            raise ManifestError(
                f"{directory}: {path} was changed or damaged (its SHA-256 is not that of {name}); {remedy}"
            )


def read_manifest(directory: str | os.PathLike, name: str, remedy: str = _AGAIN) -> dict[str, str]:
    """The SHA-256 of each path that is listed, in hex; the files are not looked at.

    Args:
        directory, name, remedy: as for verify_manifest.

    Raises:
        ManifestError: the list is missing or was changed.
        OSError: it cannot be read.
    """
    damaged = ManifestError(f"{directory}: {name}, the list of files, was changed; {remedy}")
    try:
        content = (Path(directory) / name).read_bytes()
    except FileNotFoundError:
        raise ManifestError(
            f"{directory}: {name}, the list of files, is missing; {remedy}"
        ) from None
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
