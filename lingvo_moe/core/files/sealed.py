"""Cache files that end with the SHA-256 of their name and contents, so that damaged or misplaced ones are not used."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from lingvo_moe.core.files.files import write_atomic

_DIGITS = 64  # of a SHA-256 in hex


def write_sealed(path: Path, body: bytes) -> None:
    """Writes a file atomically, in a directory that is made when missing. Raises OSError, naming it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, body + _seal(path, body))


def read_sealed(path: Path, damaged: Callable[[str], None]) -> bytes | None:
    """Reads the contents that write_sealed wrote to this path. Raises OSError: the file cannot be read.

    None if there is no file; or one that was changed, or written under another name, of which `damaged` gets a phrase.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    body, seal = content[:-_DIGITS], content[-_DIGITS:]
    if seal == _seal(path, body):
        return body
    damaged(f"{path} was changed or damaged (it does not end with its SHA-256)")
    return None


def _seal(path: Path, body: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\n" + body).hexdigest().encode()
