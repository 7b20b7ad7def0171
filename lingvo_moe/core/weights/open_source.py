"""Opens weights by what is at a path: files of safetensors, of torch.save, or of GGUF."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from lingvo_moe.core.weights.gguf_file import GgufFile
from lingvo_moe.core.weights.safetensors_file import open_safetensors
from lingvo_moe.core.weights.source import Files, TensorFile, WeightsError, WeightSource
from lingvo_moe.core.weights.torch_file import open_torch

_READERS: dict[str, Callable[[Path], TensorFile]] = {
    ".safetensors": open_safetensors,
    ".bin": open_torch,
    ".gguf": GgufFile,
}
# The names in a directory of a checkpoint, the preferred ones first.
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def open_source(path: str | Path) -> WeightSource:
    """The weights in a file, or in the directory of a checkpoint with its file or its index of files.

    Raises WeightsError: there are none, or more than one set; a file that the index names is missing; or a file lacks a
    tensor that the index says is there, or has one that it does not name.
    """
    path = Path(path)
    if not path.exists():
        raise WeightsError(f"{path}: there is no such file or directory")
    if path.is_file():
        return _open(path)
    for index, whole in zip(_INDEXES, _WHOLE, strict=True):
        if (path / index).is_file():
            return _indexed(path, index)
        if (path / whole).is_file():
            return _open(path / whole)
    files = sorted(p for p in path.glob("*") if p.suffix in _READERS)
    if len(files) != 1:
        listed = ", ".join(file.name for file in files) or "none"
        raise WeightsError(
            f"{path}: expected one of {', '.join((*_INDEXES, *_WHOLE))} or one file of {', '.join(_READERS)}; there "
            f"{'is' if len(files) < 2 else 'are'} {listed}"
        )
    return _open(files[0])


def state_of(path: str | Path) -> str:
    """A digest of the names, sizes and times of the files of a checkpoint, which tells that one was changed.

    Raises WeightsError: they cannot be listed.
    """
    path = Path(path).resolve()
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]  # which may not be there
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError as e:
        raise WeightsError(f"{path}: {e.strerror}") from e
    about = [str(path), [(name, s.st_size, s.st_mtime_ns) for name, s in stats]]
    return hashlib.sha256(repr(about).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _open(path: Path) -> TensorFile:
    if path.suffix not in _READERS:
        raise WeightsError(f"{path}: expected a file of {', '.join(_READERS)}")
    return _READERS[path.suffix](path)


def _indexed(directory: Path, name: str) -> WeightSource:
    """The files that an index names."""
    path = directory / name
    try:
        file_of = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        raise WeightsError(f"{path}: no index of files: {type(e).__name__}: {e}") from None
    if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
        raise WeightsError(f"{path}: weight_map must give the file of each tensor")
    files = {}
    for file in sorted(set(file_of.values())):
        if Path(file).name != file:
            raise WeightsError(f"{path}: names the file {file!r}, which is not beside it")
        if not (directory / file).is_file():
            raise WeightsError(
                f"{path}: names {file}, which is missing: copy it from where the rest is from"
            )
        files[file] = _open(directory / file)
    for tensor, file in file_of.items():
        if tensor not in files[file].entries:
            raise WeightsError(f"{path}: says that {tensor} is in {file}, which has no such tensor")
    for file, opened in files.items():
        for tensor in opened.entries:
            if file_of.get(tensor) != file:
                raise WeightsError(f"{path}: does not say that {tensor} is in {file}")
    return Files(str(directory), list(files.values()))
