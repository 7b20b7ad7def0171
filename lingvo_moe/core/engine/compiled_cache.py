"""Caches compiled programs on disk, so that a resumed run compiles nothing twice.

An entry is machine code that will be run. So it is read only from a directory that this user owns and nobody else can
write in, never from a run's directory, and only if its digest matches.
"""

import contextlib
import contextvars
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from lingvo_moe.core import processor
from lingvo_moe.core.console.command import say
from lingvo_moe.core.files.paths import PathError, check_local, user_cache_dir
from lingvo_moe.core.files.sealed import read_sealed, write_sealed
from lingvo_moe.core.private.jax import use_cache, watch_cache

_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_SUFFIX = ".compiled"
_MOST_BYTES = 8 << 30  # of a directory; those that were not used for the longest time go first
_LEAST_SECONDS = 0.5  # what compiles faster is not kept

_kept: list["CheckedCache"] = []  # at most one


class CacheError(ValueError):
    """A directory that machine code must not be read from."""


class CheckedCache:
    """A directory of entries, each sealed with its SHA-256. A damaged entry counts as missing."""

    def __init__(self, directory: str | os.PathLike):
        self._path = Path(directory)

    def get(self, key: str) -> bytes | None:
        """The entry's bytes; None if there is none, or, with a warning, if it is damaged."""
        file = self._path / f"{key}{_SUFFIX}"
        value = read_sealed(
            file, lambda why: say(f"compiled programs: {why}; the program is made again")
        )
        with contextlib.suppress(OSError):
            os.utime(file)  # used now
        return value

    def put(self, key: str, value: bytes) -> None:
        """Keeps an entry, complete or not at all. Raises OSError, which JAX turns into a warning."""
        write_sealed(self._path / f"{key}{_SUFFIX}", value)


def enable_compilation_cache(directory: str | os.PathLike | None = None) -> str:
    """Keeps compiled programs on disk; an entry is used only for the same program, compiler and kind of CPU.

    JAX does not distinguish CPUs by their features, so each kind of CPU has its own directory in `directory`: code for
    instructions that a machine lacks would kill the process.

    Without a `directory` it is JAX_COMPILATION_CACHE_DIR, or else `lingvo_moe/compiled` in the user's cache directory.

    Returns:
        The directory of the entries, or '' if nothing is cached, because others can write there or there is no such
        place. Then the reason is printed, and JAX's own cache (JAX_COMPILATION_CACHE_DIR) is off too.
    """
    jax.config.update("jax_compilation_cache_dir", None)
    use_cache(CheckedCache)
    _kept.clear()
    try:
        entries = _directory_of_entries(directory)
    except (CacheError, PathError, OSError, RuntimeError) as e:
        say(f"compiled programs are not kept: {e}")
        return ""
    _make_room(entries)
    jax.config.update("jax_compilation_cache_dir", str(entries))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    # XLA's own files beside the entries would be read unchecked.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    _kept.append(CheckedCache(entries))
    return str(entries)


def kept() -> CheckedCache | None:
    """The cache that enable_compilation_cache has made, for what else is worth keeping; None where it has not."""
    return _kept[0] if _kept else None


@dataclass
class CacheUse:
    """The use of JAX's cache by the compiles inside a `keeping_if`."""

    may_keep: Callable[[], bool]  # whether the cache may keep the program that was just compiled
    hit: bool = False  # whether a program came from the cache


@contextlib.contextmanager
def keeping_if(may_keep: Callable[[], bool]) -> Iterator[CacheUse]:
    """Inside, JAX's cache keeps a program that was just compiled only where `may_keep()` is true.

    Yields a CacheUse, which says afterwards whether the program came from the cache.
    """
    use = CacheUse(may_keep)
    token = _use.set(use)
    try:
        yield use
    finally:
        _use.reset(token)


_use: contextvars.ContextVar[CacheUse | None] = contextvars.ContextVar("cache_use", default=None)


def _may_keep() -> bool:
    use = _use.get()
    return use is None or use.may_keep()


def _on_hit() -> None:
    if use := _use.get():
        use.hit = True


watch_cache(_may_keep, _on_hit)


def _directory_of_entries(directory: str | os.PathLike | None) -> Path:
    """The directory for this kind of CPU, which is made when it is missing. Raises as enable_compilation_cache says."""
    if directory is None:
        directory = os.environ.get(_VARIABLE) or user_cache_dir() / "compiled"
    check_local(directory, _VARIABLE)
    top = Path(directory).absolute()
    for place in (top, top / _cpu_features()):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(place)
    return place


def _check_private(directory: Path) -> None:
    """Raises CacheError if code in this directory may be somebody else's."""
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise CacheError(f"{directory} belongs to user {status.st_uid}, not to this one")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"others can write in {directory}; delete it, and the programs in it that they may have written"
        )


def _make_room(directory: Path) -> None:
    """Deletes the entries that were not used for the longest time, until the rest is within the limit.

    Files that killed writers left count too.
    """
    entries = []
    for file in directory.glob(f"*{_SUFFIX}*"):
        with contextlib.suppress(OSError):
            status = file.stat()
            entries.append((status.st_mtime, status.st_size, file))
    size = sum(entry[1] for entry in entries)
    for _, bytes_, file in sorted(entries):
        if size <= _MOST_BYTES:
            return
        with contextlib.suppress(OSError):
            file.unlink()
        size -= bytes_


def _cpu_features() -> str:
    """A short name for the features of this machine's CPU."""
    return hashlib.sha256(processor.features().encode()).hexdigest()[:12]
