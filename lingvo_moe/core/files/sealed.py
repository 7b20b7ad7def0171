"""Cache files that end with the SHA-256 of their name and contents, so that damaged or misplaced ones are not used."""

import hashlib
from pathlib import Path

from lingvo_moe.core.files.files import write_atomic

_DIGITS = 64  # of a SHA-256 in hex


class SealError(ValueError):
    """A file was changed since it was written. The message names it."""


def write_sealed(path: Path, body: bytes) -> None:
    """Writes a file atomically. Raises OSError, naming it."""
    write_atomic(path, body + _seal(path, body))


def read_sealed(path: Path) -> bytes | None:
    """Reads the contents that write_sealed wrote to this path; None if there is no file.

    Raises:
        SealError: the file was changed, or was written under another name.
        OSError: it cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    body, seal = content[:-_DIGITS], content[-_DIGITS:]
    if seal != _seal(path, body):
        raise SealError(f"{path} was changed or damaged (it does not end with its SHA-256)")
    return body


def _seal(path: Path, body: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\n" + body).hexdigest().encode()
