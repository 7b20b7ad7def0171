"""Reads the `.bin` that torch.save writes of a dict of tensors, without torch, and without executing what it says.

The file is a zip archive: `data.pkl` describes the tensors, and `data/KEY` has the bytes of a storage. pickletools
splits the description into operations, and this module knows the few that such a dict needs: dicts, tuples, numbers,
texts, a tensor from a storage. Any other ends with an error, before anything is read. Tests have the two faults of
torch's own reader of weights alone: CVE-2025-32434, and CVE-2026-24747, items set on what is no dict and storages
smaller than they claim.
"""

import math
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingvo_moe.core.weights.source import (
    Encoding,
    TensorFile,
    TensorPlace,
    WeightsError,
    check_name,
)

_MOST = 256 << 20  # bytes of a description
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_LOCAL_HEADER = struct.Struct(
    "<4s22xHH"
)  # of an entry of a zip archive; then its name and an extra field


@dataclass(frozen=True)
class _Global:
    """The name of a class or function; nothing is imported."""

    module: str
    name: str


@dataclass(frozen=True)
class _Storage:
    """A storage of `size` values."""

    key: str
    dtype: str
    size: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int  # in values
    shape: tuple[int, ...]


class _Dict(dict):
    """A dict or an OrderedDict, which alone takes items."""


_DICT = _Global("collections", "OrderedDict")
_TENSOR = _Global("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = _Global("torch._utils", "_rebuild_parameter")


def open_torch(path: Path) -> TensorFile:
    """Raises WeightsError: it is no such file, a damaged one, or one that asks for more than tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            root, content = _description(path, archive, entries)
            tensors = _Unpickler(path).Run(content)
            places = {}
            with open(path, "rb") as file:
                for name, tensor in tensors.items():
                    storage = tensor.storage
                    entry = entries.get(f"{root}data/{storage.key}")
                    start = _start(path, file, entry, name, storage)
                    encoding = Encoding.Plain(storage.dtype)
                    offset = start + tensor.offset * encoding.size
                    places[name] = TensorPlace(tensor.shape, encoding, offset)
    except WeightsError:
        raise
    except Exception as e:  # zipfile raises whatever it stumbles over in a damaged archive
        raise WeightsError(
            f"{path}: cannot be read as a file of torch.save: {getattr(e, 'strerror', None) or e}; files by versions "
            "before 1.6 are no zip archives: save it again with a newer one"
        ) from e
    return TensorFile(path, places)


def _description(
    path: Path, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]
) -> tuple[str, bytes]:
    """The prefix of the names of the archive's entries, and the content of data.pkl."""
    names = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(names) != 1:
        raise WeightsError(
            f"{path}: has {len(names)} entries data.pkl; expected a file of torch.save"
        )
    root = names[0].removesuffix("data.pkl")
    if entries[names[0]].file_size > _MOST:
        raise WeightsError(f"{path}: its description has {entries[names[0]].file_size:,} bytes")
    if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
        raise WeightsError(f"{path}: its bytes are in big-endian order; save it on another machine")
    return root, archive.read(names[0])


def _start(
    path: Path, file: Any, entry: zipfile.ZipInfo | None, name: str, storage: _Storage
) -> int:
    """The file's bytes before the values of a storage."""
    size = storage.size * Encoding.Plain(storage.dtype).size
    if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size != size:
        there = f"{entry.file_size:,} bytes" if entry else "no bytes"
        raise WeightsError(
            f"{path}: {name} lies in a storage of {size:,} bytes, of which there are {there} in the archive"
        )
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise WeightsError(f"{path}: the archive's entry {entry.filename} is damaged")
    _, name_size, extra = _LOCAL_HEADER.unpack(header)
    return entry.header_offset + _LOCAL_HEADER.size + name_size + extra


class _Unpickler:
    """Runs the operations of a description on a stack."""

    def __init__(self, path: Path):
        self._path, self._stack, self._memo = path, list[Any](), dict[int, Any]()
        self._marks: list[int] = []

    def Run(self, content: bytes) -> dict[str, _Tensor]:
        """The tensors by name. Raises WeightsError."""
        try:
            for operation, argument, _ in pickletools.genops(content):
                self._Do(operation.name, argument)
        except WeightsError:
            raise
        except Exception as e:  # of pickletools, or of a stack that lacks what an operation takes
            raise self._Refusal(f"a damaged description ({type(e).__name__}: {e})") from None
        result = self._stack[-1] if self._stack else None
        if not isinstance(result, _Dict):
            raise self._Refusal("no dict of tensors")
        while len(result) == 1 and isinstance(inner := next(iter(result.values())), _Dict):
            result = inner  # as {"state_dict": ...}
        for name, value in result.items():
            if not isinstance(name, str) or not isinstance(value, _Tensor):
                raise self._Refusal(f"{name!r}, which is no tensor")
            check_name(self._path, name)
        return dict(result)

    def _Refusal(self, what: str) -> WeightsError:
        return WeightsError(
            f"{self._path}: holds {what}; a file of weights has a dict of tensors, and nothing else is read or executed"
        )

    def _Do(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            self._stack.append(argument)
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise self._Refusal(f"the operation {name}")

    def _Mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _AboveMark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _Take(self, number: int) -> tuple[Any, ...]:
        items = tuple(self._stack[len(self._stack) - number :])
        if len(items) < number:
            raise IndexError("an empty stack")
        del self._stack[len(self._stack) - number :]
        return items

    def _Global(self, argument: str) -> None:
        self._stack.append(_Global(*argument.split(" ", 1)))

    def _StackGlobal(self, _: Any) -> None:
        self._stack.append(_Global(*self._Take(2)))

    def _Memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _Put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _Get(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def _Items(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, _Dict):
            raise self._Refusal(f"items of {type(target).__name__}, which is no dict")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def _Storage(self, _: Any) -> None:
        """A persistent id: ("storage", class, key, device, number of values)."""
        ((tag, kind, key, _, size),) = self._Take(1)
        dtype = _STORAGES.get(kind.name) if isinstance(kind, _Global) else None
        known = tag == "storage" and isinstance(key, str) and type(size) is int and size >= 0
        if dtype is None or kind.module != "torch" or not known:
            raise self._Refusal(f"a storage {kind!r}")
        self._stack.append(_Storage(key, dtype, size))

    def _Reduce(self, _: Any) -> None:
        function, arguments = self._Take(2)
        if function == _DICT and not arguments:
            self._stack.append(_Dict())
        elif function == _TENSOR:
            self._stack.append(self._TensorOf(*arguments[:4]))
        elif function == _PARAMETER and isinstance(arguments[0], _Tensor):
            self._stack.append(arguments[0])
        else:
            named = function if isinstance(function, _Global) else type(function).__name__
            raise self._Refusal(f"a call of {named}")

    def _TensorOf(self, storage: Any, offset: Any, shape: Any, strides: Any) -> _Tensor:
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or not all(type(n) is int and n >= 0 for n in numbers):
            raise self._Refusal("a damaged tensor")
        expected = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        matters = [(a, b) for n, a, b in zip(shape, strides, expected, strict=True) if n > 1]
        if any(a != b for a, b in matters):
            raise self._Refusal(
                f"a tensor of shape {shape} whose strides {strides} are not in order"
            )
        if offset + math.prod(shape) > storage.size:
            raise self._Refusal(f"a tensor of shape {shape} that ends behind its storage")
        return _Tensor(storage, offset, tuple(shape))

    def _Build(self, _: Any) -> None:
        """The attributes of an OrderedDict, such as torch's _metadata, say nothing of tensors."""
        target, _ = self._Take(2)
        if not isinstance(target, _Dict):
            raise self._Refusal(f"the state of {type(target).__name__}")
        self._stack.append(target)


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": _Dict,
    "EMPTY_TUPLE": tuple,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "NONE": lambda: None,
}
_VALUES = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1")
_ACTIONS: dict[str, Callable[[_Unpickler, Any], None]] = {
    "MARK": _Unpickler._Mark,
    "GLOBAL": _Unpickler._Global,
    "STACK_GLOBAL": _Unpickler._StackGlobal,
    "MEMOIZE": _Unpickler._Memoize,
    "BINPUT": _Unpickler._Put,
    "LONG_BINPUT": _Unpickler._Put,
    "BINGET": _Unpickler._Get,
    "LONG_BINGET": _Unpickler._Get,
    "BINPERSID": _Unpickler._Storage,
    "REDUCE": _Unpickler._Reduce,
    "BUILD": _Unpickler._Build,
    "SETITEM": lambda u, _: u._Items(list(u._Take(2))),
    "SETITEMS": lambda u, _: u._Items(u._AboveMark()),
    "TUPLE": lambda u, _: u._stack.append(tuple(u._AboveMark())),
    "TUPLE1": lambda u, _: u._stack.append(u._Take(1)),
    "TUPLE2": lambda u, _: u._stack.append(u._Take(2)),
    "TUPLE3": lambda u, _: u._stack.append(u._Take(3)),
}
