"""Copies on this machine of places in buckets, for all that works on files: runs, exported models, caches, data.

`local_copy` is of this process alone, in a temporary directory, and what is changed there is written back. `kept_copy`
is of data, which do not change: in the user's cache, for all processes.
"""

import atexit
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from lingvo_moe.core.files.files import only_one, replaced_directory
from lingvo_moe.core.files.manifest import ManifestError, verify_manifest
from lingvo_moe.core.files.paths import user_cache_dir
from lingvo_moe.core.files.store import Bucket, LocalStore, StoreError, is_address

WRITER = "WRITER"  # the object that says who writes at an address, see core/runs/bucket_lock.py
# The parts of a run that are not copied: checkpoints are read and written in place, events only written.
_IN_PLACE, _EVENTS = ("checkpoints/", WRITER), ".tfevents."
_log = logging.getLogger(__name__)


class LocalCopy:
    """A directory with the files below an address, but for checkpoints and TensorBoard's events.

    Args:
        wanted: which of these names are copied.

    Attributes:
        path: the directory. Its name ends with the address, for messages.
        store: the place in the bucket.
        holds: renews this process's lock of the place, or raises where another process has it; None: it has no lock.

    Raises PathError: as Bucket. OSError: a file cannot be read, or not be written here.
    """

    def __init__(self, address: str, wanted: Callable[[str], bool] = lambda name: True):
        self.store, self._wanted = Bucket(address), wanted
        self._temporary = tempfile.mkdtemp(prefix="lingvo_moe.")
        atexit.register(shutil.rmtree, self._temporary, ignore_errors=True)
        self.path = Path(self._temporary, *filter(None, self.store.address.split("/")))
        self.path.mkdir(parents=True)
        self.holds: Callable[[], None] | None = None
        # The state of each file as the bucket has it, and its generation there.
        self._written = dict[Path, tuple[tuple[int, int], bytes]]()
        self._lock = threading.Lock()
        self.Fetch()

    def Fetch(self) -> None:
        """Replaces the files here by those of the bucket."""
        names = self.store.List()
        for name in names:
            if name.startswith(_IN_PLACE) or _EVENTS in name or not self._wanted(name):
                continue
            version, path = self.store.Version(name), self.path / _checked(self.store, name)
            if version.value is not None:
                LocalStore(self.path).Write(name, version.value)
                self._written[path] = _state(path), version.generation
        for path in self._written.keys() - {self.path / name for name in names}:
            path.unlink(missing_ok=True)
            del self._written[path]

    def Push(self) -> None:
        """Writes what has changed here to the bucket, oldest first: a list of files comes after the files.

        What another process has written there in the meantime stays. But where this one holds the lock, that was a
        writer that was taken for dead, and is replaced.

        Raises StoreError, and as `holds`.
        """
        with self._lock:
            files = [(p, _state(p)) for p in self.path.rglob("[!.]*") if p.is_file()]
            for path, state in sorted(files, key=lambda item: item[1]):
                name = path.relative_to(self.path).as_posix()
                before, generation = self._written.get(path, (None, b""))
                if state != before or (self.holds and not self.store.IsStill(name, generation)):
                    self._written[path] = state, self._Write(name, path.read_bytes(), generation)

    def _Write(self, name: str, data: bytes, generation: bytes) -> bytes:
        """Replaces a file of that generation, b'' where none is known; returns the one that is there then."""
        while True:
            if not generation:
                value, generation = self.store.Version(name)
                if value is not None and not self.holds:
                    _log.warning(
                        "%s/%s: was written by another process; that stays",
                        self.store.address,
                        name,
                    )
                    return generation
            # Only now: who takes the place over from here on writes another generation, or replaces this one.
            if self.holds:
                self.holds()
            if generation := self.store.Replace(name, data, generation):
                return generation


_copies = dict[str, LocalCopy]()


def local_copy(address: str | os.PathLike) -> LocalCopy:
    """The copy that this process has of an address; it is made at the first call. Raises as LocalCopy."""
    address = os.fspath(address).rstrip("/")
    if address not in _copies:
        _copies[address] = LocalCopy(address)
    return _copies[address]


def copy_at(path: Path) -> LocalCopy | None:
    """The copy whose directory this is; None for any other directory."""
    return next((copy for copy in _copies.values() if copy.path == path), None)


def local(path: str | os.PathLike) -> Path:
    """A path as it is; of an address the directory of its copy. Raises as LocalCopy."""
    return local_copy(path).path if is_address(path) else Path(path)


def push_all() -> None:
    """Writes what has changed in all copies of this process back. Raises StoreError."""
    for copy in _copies.values():
        copy.Push()


@functools.cache
def kept_copy(address: str, lists: Sequence[str]) -> Path:
    """A directory in the user's cache with the files of an address, which a list there has.

    Each file passes through memory. Processes of this machine take turns, and all but the first find it there.

    Args:
        lists: what the list of its files may be called.

    Raises:
        StoreError: there is no such list.
        ManifestError: the files are not those that are listed.
        OSError: something cannot be read, or not be written here.
    """
    store = Bucket(address)
    name = next(filter(store.Has, lists), None)
    if name is None:
        raise StoreError(
            f"{store.address}: holds no list of its files ({' or '.join(lists)}), so nothing says when a copy is whole"
        )
    directory = user_cache_dir() / "copies"
    path = directory / hashlib.sha256(store.Read(name)).hexdigest()
    with only_one(directory):
        if not path.is_dir():
            with replaced_directory(path) as temporary:
                for file in store.List():
                    LocalStore(temporary).Write(_checked(store, file), store.Read(file))
                try:
                    verify_manifest(temporary, name)
                except ManifestError as e:
                    raise ManifestError(f"a copy of {store.address}: {e}") from None
    return path


def upload(directory: Path, address: str, last: str) -> None:
    """Writes the files of a directory to an address, in place of those there; the file `last` comes last.

    Until then it is missing, so that what was begun is not taken for whole. Raises StoreError.
    """
    store = Bucket(address)
    names = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    store.Delete(last)
    for name in {*store.List()} - names:
        store.Delete(name)
    for name in [*sorted(names - {last}), last]:
        store.Write(name, (directory / name).read_bytes())


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _checked(store: Bucket, name: str) -> str:
    """A name that leads to no place above. Raises StoreError."""
    if not name or {"..", "."} & {*PurePosixPath(name).parts} or name.startswith("/"):
        raise StoreError(f"{store.address}: holds an object {name!r}, which no file can be called")
    return name
