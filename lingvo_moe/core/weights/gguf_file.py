"""Reads GGUF, version 3: metadata, the name, shape, type and place of each tensor, and values, mostly in blocks.

The format of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A shape in the file has the innermost dimension
first; here it is last. Blocks of few bits become float32.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from lingvo_moe.core.weights import gguf_blocks
from lingvo_moe.core.weights.source import (
    Encoding,
    TensorFile,
    TensorPlace,
    WeightsError,
    check_name,
)

_MAGIC, _VERSION = b"GGUF", 3
_STRING, _ARRAY = 8, 9
# The formats of struct of metadata's numbers, by the number of their type.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# By the number of a tensor's type.
_ENCODINGS = {
    0: Encoding.Plain("float32"),
    1: Encoding.Plain("float16"),
    2: Encoding("float32", 32, 18, gguf_blocks.q4_0),
    3: Encoding("float32", 32, 20, gguf_blocks.q4_1),
    8: Encoding("float32", 32, 34, gguf_blocks.q8_0),
    12: Encoding("float32", 256, 144, gguf_blocks.q4_k),
    14: Encoding("float32", 256, 210, gguf_blocks.q6_k),
    30: Encoding.Plain("bfloat16"),
}
_MOST_DIMS, _ALIGNMENT = 4, "general.alignment"


class GgufFile(TensorFile):
    """A file of GGUF.

    Attributes:
        metadata: strings, numbers, booleans and lists of these, by name.
    """

    def __init__(self, path: Path):
        """Raises WeightsError: it is no such file, a damaged one, or has a tensor of a type that is not known."""
        try:
            with open(path, "rb") as file:
                reader = _Reader(path, file)
                tensors, pairs = reader.Begin()
                self.metadata = {reader.Text(): reader.Value() for _ in range(pairs)}
                headers = [reader.Tensor() for _ in range(tensors)]
                end = file.tell()
        except OSError as e:
            raise WeightsError(f"{path}: {e.strerror or e}") from e
        alignment = self.metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1:
            raise WeightsError(
                f"{path}: {_ALIGNMENT} is {alignment!r}; expected a positive integer"
            )
        start = -(-end // alignment) * alignment
        places = {
            name: TensorPlace(shape, encoding, start + offset)
            for name, shape, encoding, offset in headers
        }
        if len(places) < len(headers):
            raise WeightsError(f"{path}: two tensors have the same name")
        super().__init__(path, places)


class _Reader:
    """Reads the parts of a header; a length is checked against the file's before it is believed."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file, self._left = path, file, path.stat().st_size

    def Begin(self) -> tuple[int, int]:
        """Returns the numbers of tensors and of pairs of metadata."""
        if self._Bytes(4) != _MAGIC:
            raise WeightsError(f"{self._path}: no file of GGUF")
        if (version := self._Number("I")) != _VERSION:
            raise WeightsError(
                f"{self._path}: GGUF of version {version}; this reads version {_VERSION}"
            )
        return self._Count(8 + 4 + 4 + 8), self._Count(8 + 4 + 1)

    def Text(self) -> str:
        data = self._Bytes(self._Count(1))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as e:
            raise WeightsError(f"{self._path}: a text of its header is not UTF-8: {e}") from None

    def Value(self) -> Any:
        return self._ValueOf(self._Number("I"))

    def Tensor(self) -> tuple[str, tuple[int, ...], Encoding, int]:
        """Name, shape, encoding and place in the data."""
        name, dims = check_name(self._path, self.Text()), self._Number("I")
        if dims > _MOST_DIMS:
            raise WeightsError(f"{self._path}: {name} has {dims} dimensions: the file is damaged")
        shape = tuple(self._Number("Q") for _ in range(dims))[::-1]
        kind = self._Number("I")
        if kind not in _ENCODINGS:
            raise WeightsError(
                f"{self._path}: {name} is stored as type {kind} of GGML; this reads F32, F16, BF16, Q4_0, Q4_1, Q8_0, "
                "Q4_K and Q6_K"
            )
        return name, shape, _ENCODINGS[kind], self._Number("Q")

    def _ValueOf(self, kind: int, inside: bool = False) -> Any:
        if kind == _STRING:
            return self.Text()
        if kind in _NUMBERS:
            return self._Number(_NUMBERS[kind])
        if kind != _ARRAY or inside:
            raise WeightsError(f"{self._path}: metadata of type {kind}: the file is damaged")
        kind = self._Number("I")
        if kind in _NUMBERS:
            size = struct.calcsize(_NUMBERS[kind])
            number = self._Count(size)
            return list(struct.unpack(f"<{number}{_NUMBERS[kind]}", self._Bytes(number * size)))
        return [self._ValueOf(kind, inside=True) for _ in range(self._Count(8))]

    def _Count(self, size: int) -> int:
        """A number of things of at least so many bytes each."""
        number = self._Number("Q")
        if number * size > self._left:
            raise WeightsError(
                f"{self._path}: claims {number:,} things, more than its bytes: it was cut, or is damaged"
            )
        return number

    def _Number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._Bytes(struct.calcsize(f"<{form}")))[0]

    def _Bytes(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= size
        if len(data) < size:
            raise WeightsError(f"{self._path}: ends within its header: it was cut")
        return data
