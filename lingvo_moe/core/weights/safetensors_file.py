"""Reads and writes safetensors: a length, a header in JSON with the type, shape and place of each tensor, and bytes.

The format of https://github.com/huggingface/safetensors, whose library would map whole files into memory.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lingvo_moe.core.weights.source import (
    Encoding,
    Entry,
    FileBytes,
    TensorFile,
    TensorPlace,
    WeightsError,
    check_name,
)

_HEADER = 100 << 20  # bytes of a header at most, as the format says
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
# The formats' name of each type.
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


def open_safetensors(path: Path | FileBytes) -> TensorFile:
    """Raises WeightsError: it is no such file, a damaged one, or one with tensors that overlap or leave gaps."""
    path = path if isinstance(path, FileBytes) else FileBytes(path)
    try:
        header, start = _read_header(path)
    except OSError as e:
        raise WeightsError(f"{path}: {e.strerror or e}") from e
    places = {
        name: _place(path, check_name(path, name), about, start)
        for name, about in header.items()
        if name != _METADATA
    }
    end = start
    for name, place in sorted(places.items(), key=lambda item: (item[1].offset, item[1].size)):
        if place.offset != end:
            raise WeightsError(
                f"{path}: {name} begins at byte {place.offset - start:,} of the data, where {end - start:,} was "
                "expected: the header is damaged"
            )
        end += place.size
    if (size := path.Size(end)) != end:
        other = f"has {size:,}" if size is not None else "does not"
        raise WeightsError(
            f"{path}: its tensors end at byte {end:,}, but the file {other}: it was cut, or copied incompletely"
        )
    return TensorFile(path, places)


def _read_header(path: FileBytes) -> tuple[dict[str, Any], int]:
    """The header, and the file's bytes before the data."""
    prefix = path.Read(0, 8).tobytes()
    size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    text = path.Read(8, size).tobytes() if 2 <= size <= _HEADER else b""
    if not text or len(text) < size:
        raise WeightsError(f"{path}: no file of safetensors, or its beginning is damaged")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as e:
        raise WeightsError(f"{path}: the header of safetensors is damaged: {e}") from None
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: the header of safetensors must be an object")
    return header, 8 + size


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(named := dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return named


def _place(path: FileBytes, name: str, about: Any, start: int) -> TensorPlace:
    try:
        dtype, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise WeightsError(f"{path}: {name} lacks dtype, shape or data_offsets") from None
    if not isinstance(shape, list) or not all(
        type(n) is int and n >= 0 for n in (*shape, begin, end)
    ):
        raise WeightsError(f"{path}: {name} has the shape {shape} at {begin} to {end}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WeightsError(
            f"{path}: {name} has values of the type {dtype}; known are {', '.join(_DTYPES)}"
        )
    place = TensorPlace(tuple(shape), Encoding.Plain(_DTYPES[dtype]), start + begin)
    if place.size != end - begin:
        raise WeightsError(
            f"{path}: {name} has {end - begin:,} bytes, where {dtype}{shape} has {place.size:,}"
        )
    return place


def write_safetensors(
    file: BinaryIO, entries: Mapping[str, Entry], tensors: Iterable[np.ndarray]
) -> None:
    """Writes a file: its header, then each tensor as it comes, in the order of the entries."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + math.prod(entry.shape) * np.dtype(entry.dtype).itemsize
        header[name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for (name, entry), tensor in zip(entries.items(), tensors, strict=True):
        assert (tensor.shape, str(tensor.dtype)) == (entry.shape, entry.dtype), name
        file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
