"""Checks the paths that flags and parameters name, before anything is written; and where caches lie.

The libraries' treatment of special characters was found by trying each of them:

* TensorStore and TensorFlow write below a directory with `[`, `]` or a backslash in its name, and cannot read what
  they wrote: they take these for a pattern.
* TensorStore, TensorFlow and ArrayRecord take no name that is not UTF-8.

All other characters work: spaces, newlines, wildcards, percent signs, any letter of Unicode.
"""

import os
import re
from pathlib import Path

# pathlib makes one slash of two, so that `gs:/bucket` may be what is left of an address.
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_PATTERNS = "[]\\"
_LONGEST = 4096 - 256  # bytes: the kernel's limit, less what lies below a run's directory
_LINK = "a symbolic link to it, with a plain name, works (ln -s)"


class PathError(ValueError):
    """A path that cannot be used. The message names the flag, the path and the reason."""


def check_local(path: str | os.PathLike, what: str) -> None:
    """Accepts a path for plain files, which only Python and ArrayRecord read or write.

    An empty path is accepted. `what` is the flag or parameter, for the error, e.g. '--output'.

    Raises:
        PathError: a remote address, a home directory that no shell filled in, or a name that is not UTF-8.
    """
    text = os.fspath(path)
    said = _said(text, what)
    if _REMOTE.match(text):
        raise PathError(
            f"{said}: remote storage is not supported here; name a local path (a bucket can be mounted)"
        )
    if text == "~" or text.startswith("~/"):
        raise PathError(
            f"{said}: '~' is only replaced by a shell, and only at the beginning of a word; write "
            f"{what}=$HOME{text[1:]}, or ./{text} for a directory of that name"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PathError(f"{said}: the name is not UTF-8; rename it") from None
    if "\0" in text:
        raise PathError(f"{said}: a path cannot hold a null character")


def check_portable(path: str | os.PathLike, what: str) -> None:
    """Accepts a path for directories that TensorStore or TensorFlow read or write: runs and exported models.

    Arguments are those of check_local.

    Raises:
        PathError: as check_local; or the absolute path is too long, or holds what these libraries misread.
    """
    check_local(path, what)
    if not os.fspath(path):
        return
    said, whole = _said(os.fspath(path), what), os.path.abspath(path)
    check_local(whole, what)  # the working directory may have a name of its own kind
    pattern = next((c for c in _PATTERNS if c in whole), None)
    if pattern:
        raise PathError(
            f"{said}: checkpoints and models could not be read again from a directory with {pattern} in its path, "
            f"{whole!r}; choose another path; {_LINK}"
        )
    if len(whole.encode()) > _LONGEST:
        raise PathError(
            f"{_said(whole[:40], what)}...: {len(whole.encode())} bytes long; at most {_LONGEST} can be, since "
            "checkpoints lie below"
        )


def absolute(path: str | os.PathLike) -> str:
    """A path from the root; an address as it is."""
    return os.fspath(path) if _REMOTE.match(os.fspath(path)) else os.path.abspath(path)


def user_cache_dir() -> Path:
    """The directory of this user's caches, which may be deleted at any time; it may not be there yet.

    It is `lingvo_moe` in XDG_CACHE_HOME, or in `~/.cache`.

    Raises RuntimeError: there is no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lingvo_moe"


def _said(text: str, what: str) -> str:
    """The flag and its value, on one line."""
    return f"{what}={text if text.isprintable() else ascii(text)}"
