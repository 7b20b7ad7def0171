"""Lists the files of a directory with their digests, so that later changes (also of the list) are detected.

The list has a line `<hex digits>  <path>` for each file, as `sha256sum --check` and `xxh128sum --check` read it, and a
last one with the SHA-256 of the lines before. It detects damage, not malice: whoever can write the directory can also
write another list.

A symbolic link to a file stands for that file's contents. A link to a directory is refused, because it may be circular;
pipes and devices are refused, because they may be endless.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from lingvo_moe.core.files.files import write_atomic

SHA256 = "SHA-256"
# Eight times as fast as SHA-256, not cryptographic: for checkpoints, whose digests must cost little.
XXH128 = "XXH128"
_DIGESTS: Mapping[str, Callable[..., Any]] = {SHA256: hashlib.sha256, XXH128: xxhash.xxh3_128}
_BY_LENGTH = {64: SHA256, 32: XXH128}  # hex digits
_PIECES = {SHA256: 1 << 16, XXH128: 1 << 20}  # bytes read at once
_THREADS = 2
_LINE = re.compile(rb"([0-9a-f]{64}|[0-9a-f]{32})  ([^\n]+)")
_CHANGED = "was changed or damaged (its {} is not that of"
_AGAIN = "copy the directory again, or write it again"


class ManifestError(ValueError):
    """A directory differs from its list. The message names the file and what to do."""


def write_manifest(
    directory: str | os.PathLike,
    name: str,
    files: Iterable[str] | None = None,
    digest: str = SHA256,
) -> None:
    """Lists files below `directory`; the list is written completely or not at all.

    Args:
        name: of the list, a path in `directory`; what lies there is replaced.
        files: which to list, as paths in `directory` with slashes; None for all.
        digest: SHA256 or XXH128.

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
        lines.append(f"{_digest(directory / path, digest)}  {path}\n")
    body = "".join(lines).encode("utf-8", "surrogateescape")
    write_atomic(directory / name, body + _last_line(body))


def verify_manifest(
    directory: str | os.PathLike,
    name: str,
    files: Iterable[str] | None = None,
    remedy: str = _AGAIN,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Reads files of `directory`, a piece at a time, and compares them with the list in `name`.

    Args:
        files: which to verify, as paths in `directory` with slashes; None for all, and nothing else may be there.
        remedy: what to do about a damaged file, for the message.
        part: (i, n): read only the i-th share of n of these files, for n processes that share the work.

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
    number, parts = part
    mine = sorted(wanted)[number::parts]
    with ThreadPoolExecutor(_THREADS) as pool:  # digests are computed without Python's lock
        for path, wrong in zip(mine, pool.map(partial(_difference, directory, listed), mine)):
            if wrong:
                raise ManifestError(f"{directory}: {path} {wrong} {name}); {remedy}")


def read_listed(
    directory: str | os.PathLike, name: str, files: Iterable[str], remedy: str = _AGAIN
) -> dict[str, bytes]:
    """Reads some listed files and verifies them.

    Arguments are those of verify_manifest.

    Raises:
        ManifestError: a file was changed, is missing or is not listed, or the list itself was changed.
        OSError: a file cannot be read.
    """
    directory = Path(directory)
    listed = read_manifest(directory, name, remedy)
    found = {}
    for path in files:
        if path not in listed:
            raise ManifestError(f"{directory}: {path} is not in {name}; {remedy}")
        if not (directory / path).is_file():
            raise ManifestError(f"{directory}: {path} is missing, or no file; {remedy}")
        found[path] = (directory / path).read_bytes()
        kind = _BY_LENGTH[len(listed[path])]
        if _DIGESTS[kind](found[path]).hexdigest() != listed[path]:
            raise ManifestError(f"{directory}: {path} {_CHANGED.format(kind)} {name}); {remedy}")
    return found


def read_manifest(directory: str | os.PathLike, name: str, remedy: str = _AGAIN) -> dict[str, str]:
    """The listed digest of each path, in hex; the files are not read.

    Arguments are those of verify_manifest.

    Raises:
        ManifestError: the list is missing or was changed.
        OSError: it cannot be read.
    """
    damaged = ManifestError(f"{directory}: {name}, the list of files, was changed; {remedy}")
    if not (Path(directory) / name).is_file():
        raise ManifestError(f"{directory}: {name}, the list of files, is missing; {remedy}")
    content = (Path(directory) / name).read_bytes()
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
    """Says why a manifest cannot list a path; '' for a file and for a directory."""
    if path.is_symlink() and path.is_dir():
        return "is a symbolic link to a directory; put the directory itself there"
    if path.is_symlink() and not path.exists():
        return f"leads to no file; {_AGAIN}"
    if path.exists() and not path.is_file() and not path.is_dir():
        return "is no file but a pipe or a device; it does not belong there"
    return ""


def _difference(directory: Path, listed: Mapping[str, str], path: str) -> str:
    """Returns a phrase about a file that differs from the list, before the list's name; '' if it does not."""
    if wrong := _cannot_be_listed(directory / path):
        return f"{wrong} (it is in"
    kind = _BY_LENGTH[len(listed[path])]
    return "" if _digest(directory / path, kind) == listed[path] else _CHANGED.format(kind)


def _digest(path: Path, digest: str) -> str:
    state = _DIGESTS[digest]()
    with open(path, "rb", buffering=0) as file:
        piece = memoryview(bytearray(min(_PIECES[digest], os.fstat(file.fileno()).st_size + 1)))
        while size := file.readinto(piece):
            state.update(piece[:size])
    return state.hexdigest()
