"""Opens weights by what is at a path: files of safetensors, of torch.save, or of GGUF; in a bucket, of safetensors."""

import hashlib
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from lingvo_moe.core.files.store import Bucket, LocalStore, Store, StoreError, is_address
from lingvo_moe.core.weights.gguf_file import GgufFile
from lingvo_moe.core.weights.safetensors_file import open_safetensors
from lingvo_moe.core.weights.source import (
    FileBytes,
    Files,
    TensorFile,
    WeightsError,
    WeightSource,
)
from lingvo_moe.core.weights.torch_file import open_torch

_READERS: dict[str, Callable[[Path], TensorFile]] = {
    ".safetensors": open_safetensors,
    ".bin": open_torch,
    ".gguf": GgufFile,
}
# The names in a directory of a checkpoint, the preferred ones first.
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def open_source(path: str | os.PathLike) -> WeightSource:
    """The weights in a file, or in the directory of a checkpoint with its file or its index of files.

    Of a bucket it is the address of a directory, whose weights are read in ranges, each when it is asked for.

    Raises WeightsError: there are none, or more than one set; a file that the index names is missing; or a file lacks a
    tensor that the index says is there, or has one that it does not name.
    """
    if is_address(path):
        bucket = Bucket(str(path))
        source = _in_directory(bucket, _names_in(bucket))
        return Files(bucket.address, [source]) if isinstance(source, TensorFile) else source
    path = Path(path)
    if not path.exists():
        raise WeightsError(f"{path}: there is no such file or directory")
    if path.is_file():
        return _open(path)
    return _in_directory(LocalStore(path), {p.name for p in path.iterdir() if p.is_file()})


def _names_in(bucket: Bucket) -> list[str]:
    """The files of a directory in a bucket. Raises WeightsError: it cannot be listed, or has none."""
    try:
        names = [name for name in bucket.List() if "/" not in name]
    except StoreError as e:
        raise WeightsError(str(e)) from e
    if not names:
        raise WeightsError(f"{bucket.address}: there is no such directory in the bucket")
    return names


def _in_directory(store: Store, names: Collection[str]) -> WeightSource:
    """The weights among the files of a place."""
    for index, whole in zip(_INDEXES, _WHOLE, strict=True):
        if index in names:
            return _indexed(store, index, names)
        if whole in names:
            return _open_in(store, whole)
    files = sorted(name for name in names if Path(name).suffix in _READERS)
    if len(files) != 1:
        listed = ", ".join(files) or "none"
        raise WeightsError(
            f"{store.address}: expected one of {', '.join((*_INDEXES, *_WHOLE))} or one file of {', '.join(_READERS)}; "
            f"there {'is' if len(files) < 2 else 'are'} {listed}"
        )
    return _open_in(store, files[0])


class _BucketBytes(FileBytes):
    """The bytes of a file in a bucket: each range is a request."""

    def __init__(self, store: Bucket, name: str):
        self._store, self.name = store, name
        self._size: int | None = None  # where it was asked for

    def __str__(self) -> str:
        return f"{self._store.address}/{self.name}"

    def Read(self, offset: int, size: int) -> np.ndarray:
        return np.frombuffer(self._store.Range(self.name, offset, offset + size), np.uint8)

    def Size(self, expected: int) -> int | None:
        if self._size != expected:
            last, after = (self.Read(at, 1).size for at in (expected - 1, expected))
            self._size = expected if last and not after else None
        return self._size


def _open_in(store: Store, name: str) -> TensorFile:
    if not isinstance(store, Bucket):
        return _open(Path(store.address) / name)
    if Path(name).suffix != ".safetensors":
        raise WeightsError(
            f"{store.address}/{name}: from a bucket files of safetensors are read; copy the directory of others here"
        )
    return open_safetensors(_BucketBytes(store, name))


def state_of(path: str | os.PathLike) -> str:
    """A digest of the names, sizes and times of the files of a checkpoint, which tells that one was changed.

    Raises WeightsError: they cannot be listed.
    """
    if is_address(path):
        bucket = Bucket(str(path))
        return _digest([bucket.address, [(n, bucket.Generation(n)) for n in _names_in(bucket)]])
    path = Path(path).resolve()
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]  # which may not be there
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError as e:
        raise WeightsError(f"{path}: {e.strerror}") from e
    about = [str(path), [(name, s.st_size, s.st_mtime_ns) for name, s in stats]]
    return _digest(about)


def _digest(about: list) -> str:
    return hashlib.sha256(repr(about).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _open(path: Path) -> TensorFile:
    if path.suffix not in _READERS:
        raise WeightsError(f"{path}: expected a file of {', '.join(_READERS)}")
    return _READERS[path.suffix](path)


def _indexed(store: Store, name: str, names: Collection[str]) -> WeightSource:
    """The files that an index names, of those in its directory."""
    path = f"{store.address}/{name}"
    try:
        file_of = json.loads(store.Read(name))["weight_map"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        raise WeightsError(f"{path}: no index of files: {type(e).__name__}: {e}") from None
    if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
        raise WeightsError(f"{path}: weight_map must give the file of each tensor")
    files = {}
    for file in sorted(set(file_of.values())):
        if Path(file).name != file:
            raise WeightsError(f"{path}: names the file {file!r}, which is not beside it")
        if file not in names:
            raise WeightsError(
                f"{path}: names {file}, which is missing: copy it from where the rest is from"
            )
        files[file] = _open_in(store, file)
    for tensor, file in file_of.items():
        if tensor not in files[file].entries:
            raise WeightsError(f"{path}: says that {tensor} is in {file}, which has no such tensor")
    for file, opened in files.items():
        for tensor in opened.entries:
            if file_of.get(tensor) != file:
                raise WeightsError(f"{path}: does not say that {tensor} is in {file}")
    return Files(store.address, list(files.values()))
