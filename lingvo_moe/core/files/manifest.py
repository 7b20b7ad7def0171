"""Lists the files of a directory with their digests, so that later changes (also of the list) are detected.

The list has a line `<hex digits>  <path>` for each file, as `sha256sum --check` and `xxh128sum --check` read it, and a
last one with the SHA-256 of the lines before. It detects damage, not malice: whoever can write the directory can also
write another list.

The directory is a path or a Store. A symbolic link to a file stands for that file's contents. A link to a directory is
refused, because it may be circular; pipes and devices are refused, because they may be endless.
"""

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import xxhash

from lingvo_moe.core.files.store import LocalStore, Store, cannot_be_listed, open_store

SHA256 = "SHA-256"
# Eight times as fast as SHA-256, not cryptographic: for checkpoints, whose digests must cost little.
XXH128 = "XXH128"
_DIGESTS: Mapping[str, Callable[..., Any]] = {SHA256: hashlib.sha256, XXH128: xxhash.xxh3_128}
_BY_LENGTH = {64: SHA256, 32: XXH128}  # hex digits
_THREADS = 2
_LINE = re.compile(rb"([0-9a-f]{64}|[0-9a-f]{32})  ([^\n]+)")
_CHANGED = "was changed or damaged (its {} is not that of"
_AGAIN = "copy the directory again, or write it again"


# A directory whose files are listed.
Place = str | os.PathLike | Store


class ManifestError(ValueError):
    """A directory differs from its list. The message names the file and what to do."""


def write_manifest(
    directory: Place,
    name: str,
    files: Iterable[str] | None = None,
    digest: str = SHA256,
    digests: Mapping[str, str] | None = None,
) -> None:
    """Lists files below `directory`; the list is written completely or not at all.

    Args:
        name: of the list, a path in `directory`; what lies there is replaced.
        files: which to list, as paths in `directory` with slashes; None for all.
        digest: SHA256 or XXH128.
        digests: the digests, in hex, of files that need not be read for them.

    Raises:
        ManifestError: a link to a directory, a pipe or a device.
        ValueError: a file whose name holds a newline.
        OSError: a file cannot be read, or the list cannot be written.
    """
    store, digests = _opened(directory), digests or {}
    lines = []
    for path in sorted((_files(store) if files is None else set(files)) - {name}):
        if "\n" in path:
            raise ValueError(f"{store.address}: a file's name holds a newline: {path!r}")
        lines.append(f"{digests.get(path) or digest_of(store, path, digest)}  {path}\n")
    body = "".join(lines).encode("utf-8", "surrogateescape")
    store.Write(name, body + _last_line(body))


def verify_manifest(
    directory: Place,
    name: str,
    files: Iterable[str] | None = None,
    remedy: str = _AGAIN,
    part: tuple[int, int] = (0, 1),
    beside: Collection[str] = (),
) -> None:
    """Reads files of `directory`, a piece at a time, and compares them with the list in `name`.

    Args:
        files: which to verify, as paths in `directory` with slashes; None for all, and nothing else may be there.
        remedy: what to do about a damaged file, for the message.
        part: (i, n): read only the i-th share of n of these files, for n processes that share the work.
        beside: files that may be there without being listed.

    Raises:
        ManifestError: a file was changed, is missing or is not listed, or the list itself was changed; or as
            write_manifest.
        OSError: a file cannot be read.
    """
    store = _opened(directory)
    where, listed = store.address, read_manifest(store, name, remedy)
    wanted = set(listed) if files is None else set(files)
    if files is None:
        present = _files(store) - {name, *beside}
    else:
        present = {path for path in wanted if store.Has(path)}
    for path in sorted(wanted - present):
        raise ManifestError(f"{where}: {path} is missing ({name} lists it); {remedy}")
    for path in sorted(present - listed.keys()):
        raise ManifestError(f"{where}: {path} is not in {name}; it does not belong there")
    number, parts = part
    mine = sorted(wanted)[number::parts]
    with ThreadPoolExecutor(_THREADS) as pool:  # digests are computed without Python's lock
        for path, wrong in zip(mine, pool.map(partial(_difference, store, listed), mine)):
            if wrong:
                raise ManifestError(f"{where}: {path} {wrong} {name}); {remedy}")


def read_listed(
    directory: Place, name: str, files: Iterable[str], remedy: str = _AGAIN
) -> dict[str, bytes]:
    """Reads some listed files and verifies them.

    Arguments are those of verify_manifest.

    Raises:
        ManifestError: a file was changed, is missing or is not listed, or the list itself was changed.
        OSError: a file cannot be read.
    """
    store = _opened(directory)
    where, listed = store.address, read_manifest(store, name, remedy)
    contents = {}
    for path in files:
        if path not in listed:
            raise ManifestError(f"{where}: {path} is not in {name}; {remedy}")
        try:
            contents[path] = store.Read(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise ManifestError(f"{where}: {path} is missing, or no file; {remedy}") from None
        kind = _BY_LENGTH[len(listed[path])]
        if _DIGESTS[kind](contents[path]).hexdigest() != listed[path]:
            raise ManifestError(f"{where}: {path} {_CHANGED.format(kind)} {name}); {remedy}")
    return contents


def read_manifest(directory: Place, name: str, remedy: str = _AGAIN) -> dict[str, str]:
    """The listed digest of each path, in hex; the files are not read.

    Arguments are those of verify_manifest.

    Raises:
        ManifestError: the list is missing or was changed.
        OSError: it cannot be read.
    """
    store = _opened(directory)
    damaged = ManifestError(f"{store.address}: {name}, the list of files, was changed; {remedy}")
    try:
        content = store.Read(name)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ManifestError(
            f"{store.address}: {name}, the list of files, is missing; {remedy}"
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


def _opened(directory: Place) -> Store:
    return directory if isinstance(directory, Store) else open_store(directory)


def _files(store: Store) -> set[str]:
    """All names. Raises ManifestError: what cannot be listed."""
    try:
        return set(store.List())
    except ValueError as e:
        raise ManifestError(str(e)) from None


def _difference(store: Store, listed: Mapping[str, str], path: str) -> str:
    """Returns a phrase about a file that differs from the list, before the list's name; '' if it does not."""
    if isinstance(store, LocalStore) and (wrong := cannot_be_listed(store.path / path)):
        return f"{wrong} (it is in"
    kind = _BY_LENGTH[len(listed[path])]
    return "" if digest_of(store, path, kind) == listed[path] else _CHANGED.format(kind)


def digest_of(store: Store, path: str, digest: str) -> str:
    """The digest of a file, in hex; SHA256 or XXH128. Raises OSError."""
    state = _DIGESTS[digest]()
    for piece in store.Pieces(path):
        state.update(piece)
    return state.hexdigest()
