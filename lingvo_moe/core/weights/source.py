"""Tensors by name, whose shapes and types are known before one is read: weights as others store them."""

import abc
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 and float8 then
import numpy as np

from lingvo_moe.core.config.checks import did_you_mean

_AT_ONCE = 32 << 20  # bytes of a tensor


class WeightsError(ValueError):
    """Weights that cannot be read, or that are not those of the model: names the file and the tensor."""


@dataclass(frozen=True)
class Entry:
    """The shape and type of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: str  # NumPy's name of the type that Read returns, or one of ml_dtypes: 'bfloat16', 'float8_e4m3fn'
    # The name of the form that the values have in the file, where that is no type, e.g. 'q4_1'.
    form: str = field(default="", compare=False, repr=False)


class WeightSource(abc.ABC):
    """Tensors by name.

    Attributes:
        where: the file or directory, for messages.
        entries: the shape and type of each tensor.
    """

    where: str
    entries: Mapping[str, Entry]

    @abc.abstractmethod
    def Read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor, or a range of its first dimension.

        Raises WeightsError: there is no such tensor, or it cannot be read.
        """

    def About(self, name: str) -> Entry:
        """The shape and type of a tensor. Raises WeightsError: there is none of that name."""
        if name not in self.entries:
            guess = did_you_mean(name, list(self.entries))
            raise WeightsError(f"{self.where}: has no tensor {name!r}{guess}")
        return self.entries[name]


def same_values(source: WeightSource, one: str, other: str) -> bool:
    """Whether two tensors have the same bytes; reads a part of them at a time."""
    entry = source.About(one)
    if source.About(other) != entry or not entry.shape:
        return False
    row = math.prod(entry.shape[1:]) * np.dtype(entry.dtype).itemsize
    if not row:  # whose other dimension may be of any size
        return True
    step = max(1, _AT_ONCE // row)
    for begin in range(0, entry.shape[0], step):
        part = slice(begin, begin + step)
        a, b = (source.Read(name, part).reshape(-1).view(np.uint8) for name in (one, other))
        if not np.array_equal(a, b):
            return False
    return True


def check_name(path: object, name: str) -> str:
    """Returns a tensor's name, to stand in messages. Raises WeightsError: it has characters that cannot."""
    if not name.isprintable():
        raise WeightsError(f"{path}: a tensor is called {reprlib.repr(name)}: the file is damaged")
    return name


@dataclass(frozen=True)
class Encoding:
    """The blocks of bytes in which a file has values."""

    dtype: str  # the type of the values
    values: int  # the values of a block
    size: int  # the bytes of a block
    # uint8 [blocks, size] to [blocks, values] in `dtype`; None: the bytes are the values.
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    @classmethod
    def Plain(cls, dtype: str) -> "Encoding":
        """Values one after another."""
        return cls(dtype, 1, np.dtype(dtype).itemsize)

    def Entry(self, shape: tuple[int, ...]) -> Entry:
        """Returns what is known of a tensor of that shape."""
        return Entry(shape, self.dtype, self.decode.__name__ if self.decode else "")


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a file."""

    shape: tuple[int, ...]
    encoding: Encoding
    offset: int  # the file's bytes before it

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) // self.encoding.values * self.encoding.size


class FileBytes:
    """The bytes of a file on this machine. As a text it is the file's path; `name` is the last part of that."""

    def __init__(self, path: Path):
        self._path, self.name = path, path.name

    def __str__(self) -> str:
        return str(self._path)

    def Read(self, offset: int, size: int) -> np.ndarray:
        """Bytes from a place on, uint8; fewer where the file ends. Raises OSError."""
        return np.fromfile(self._path, np.uint8, size, offset=offset)

    def Size(self, expected: int) -> int | None:
        """Its size. Raises OSError. A file that can only be asked whether it has the expected size says None if not."""
        return self._path.stat().st_size


class TensorFile(WeightSource):
    """A file with tensors at known places.

    Raises WeightsError: a tensor lies beyond the file's end, or is cut within a block.
    """

    def __init__(self, file: Path | FileBytes, places: Mapping[str, TensorPlace]):
        self.file = file if isinstance(file, FileBytes) else FileBytes(file)
        self.where, self._places = str(self.file), places
        self.entries = {name: p.encoding.Entry(p.shape) for name, p in places.items()}
        ends = [place.offset + place.size for place in places.values()]
        end = (self.file.Size(max(ends)) if ends else None) or 0
        for name, place in places.items():
            row = place.shape[-1] if place.shape else 1
            if row % place.encoding.values:
                raise WeightsError(
                    f"{file}: {name} has rows of {row} values, which are stored by {place.encoding.values}"
                )
            if place.offset < 0 or place.offset + place.size > end:
                raise WeightsError(
                    f"{file}: {name} ends at byte {place.offset + place.size:,}, but the file has {end:,}: it was cut, "
                    "or its header is damaged"
                )

    def Read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        self.About(name)
        place = self._places[name]
        start, stop, step = rows.indices(place.shape[0]) if place.shape else (0, 1, 1)
        assert step == 1 and stop >= start
        shape = (stop - start, *place.shape[1:]) if place.shape else ()
        encoding = place.encoding
        row = place.size // max(1, place.shape[0]) if place.shape else place.size
        size = row * (stop - start)
        try:
            raw = self.file.Read(place.offset + row * start, size)
        except OSError as e:
            raise WeightsError(f"{self.file}: {name} cannot be read: {e.strerror or e}") from e
        if raw.size != size:
            raise WeightsError(f"{self.file}: {name} cannot be read: the file became shorter")
        if encoding.decode is None:
            return raw.view(encoding.dtype).reshape(shape)
        return encoding.decode(raw.reshape(-1, encoding.size)).reshape(shape)


class Files(WeightSource):
    """The tensors of several files. Raises WeightsError: two have a tensor of the same name."""

    def __init__(self, where: str, files: "list[TensorFile]"):
        self.where, self._file = where, dict[str, TensorFile]()
        for file in files:
            for name in file.entries:
                if name in self._file:
                    other = self._file[name].file.name
                    raise WeightsError(f"{where}: {name} is in {other} and in {file.file.name}")
                self._file[name] = file
        self.entries = {name: file.entries[name] for name, file in self._file.items()}

    def Read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        self.About(name)
        return self._file[name].Read(name, rows)
