"""Shows weights of few bits, which are stored with scales in tensors beside them, as tensors of bfloat16.

- float8 by blocks, as DeepSeek-V3: `X.weight` [O,I], and `X.weight_scale_inv` or `X.scale` [ceil(O/128), ceil(I/128)],
  which multiplies a block, whatever its name says; the last block of a row or column may be smaller.
- MXFP4, as gpt-oss: `X_blocks` uint8 [E,O,G,16], two values a byte, the low half first, and `X_scales` uint8 [E,O,G],
  exponents of 2 with a bias of 127. X is [E,O,32 G] with its last two dimensions exchanged, as in gpt-oss' files of
  bfloat16.
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from lingvo_moe.core.weights.source import Entry, WeightsError, WeightSource

_BLOCK = 128
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
_SCALE_TYPES = ("float32", "bfloat16", "float8_e8m0fnu")
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_MXFP4 = np.concatenate([_FP4, -_FP4])
_BYTES = np.arange(256, dtype=np.uint8)  # all values of float8: faster than ml_dtypes' conversion
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Dequantized(WeightSource):
    """A source whose tensors of few bits are of bfloat16, without those of scales.

    Raises WeightsError: a tensor of float8 has no scale, or one of another shape; or blocks have no scales.
    """

    def __init__(self, source: WeightSource):
        self.where, self._source = source.where, source
        self._scale_of: dict[str, str] = {}
        used = set[str]()
        entries: dict[str, Entry] = {}
        for name, entry in source.entries.items():
            if entry.dtype in _FLOAT8 and not name.endswith(_SCALES):
                self._scale_of[name] = scale = self._Scale(name, entry)
                entries[name] = Entry(entry.shape, "bfloat16", entry.dtype)
                used.add(scale)
            elif name.endswith("_blocks") and entry.dtype == "uint8":
                whole = name.removesuffix("_blocks")
                entries[whole] = Entry(self._ShapeOf(whole, entry), "bfloat16", "mxfp4")
                used |= {name, f"{whole}_scales"}
            else:
                entries[name] = entry
        self.entries: Mapping[str, Entry] = {n: e for n, e in entries.items() if n not in used}

    def Read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        self.About(name)
        if name in self._scale_of:
            return self._Float8(name, rows)
        if name in self._source.entries:
            return self._source.Read(name, rows)
        return self._Mxfp4(name, rows)

    def _Scale(self, name: str, entry: Entry) -> str:
        """The name of the scales of a tensor of float8."""
        stem = name.removesuffix(".weight")
        names = [stem + end for end in _SCALES if stem + end in self._source.entries]
        if len(names) != 1:
            raise WeightsError(
                f"{self.where}: {name} is of {entry.dtype}, and has {len(names)} tensors of scales; expected one, "
                f"{stem}{_SCALES[0]}: without it the values are wrong"
            )
        shape = tuple(-(-n // _BLOCK) for n in entry.shape)
        if self._source.entries[names[0]].dtype not in _SCALE_TYPES:
            raise WeightsError(
                f"{self.where}: {names[0]} is of {self._source.entries[names[0]].dtype}; expected scales of "
                f"{', '.join(_SCALE_TYPES)}"
            )
        if len(shape) != 2 or self._source.entries[names[0]].shape != shape:
            raise WeightsError(
                f"{self.where}: {names[0]} has the shape {list(self._source.entries[names[0]].shape)}; blocks of "
                f"{_BLOCK} of {name}, {list(entry.shape)}, need {list(shape)}, of a matrix"
            )
        return names[0]

    def _Float8(self, name: str, rows: slice) -> np.ndarray:
        """float32 values * scales, rounded to bfloat16."""
        start, stop, _ = rows.indices(self.entries[name].shape[0])
        bits = self._source.Read(name, rows)
        values = _BYTES.view(bits.dtype).astype(np.float32)[bits.view(np.uint8)]
        scales = self._source.Read(self._scale_of[name]).astype(np.float32)
        of_rows = scales[np.arange(start, stop) // _BLOCK]
        values *= np.repeat(of_rows, _BLOCK, axis=1)[:, : values.shape[1]]
        return values.astype(_BFLOAT16)

    def _ShapeOf(self, name: str, blocks: Entry) -> tuple[int, ...]:
        scales = self._source.entries.get(f"{name}_scales")
        outer, size = blocks.shape[:-1], blocks.shape[-1:]
        there = scales and (len(outer), size, scales.shape, scales.dtype)
        if there != (3, (16,), outer, "uint8"):
            raise WeightsError(
                f"{self.where}: {name}_blocks has the shape {list(blocks.shape)}, and {name}_scales "
                f"{list(scales.shape) if scales else 'is not there'}; expected [experts, rows, blocks, 16], and a "
                "scale for each block"
            )
        experts, rows, groups = outer
        return (experts, groups * 32, rows)

    def _Mxfp4(self, name: str, rows: slice) -> np.ndarray:
        blocks = self._source.Read(f"{name}_blocks", rows)
        exponents = self._source.Read(f"{name}_scales", rows).astype(np.int32) - 127
        values = np.stack([_MXFP4[blocks & 15], _MXFP4[blocks >> 4]], -1)
        values = np.ldexp(values.reshape(*blocks.shape[:-1], 32), exponents[..., np.newaxis])
        matrix = values.reshape(*blocks.shape[:-2], -1).astype(_BFLOAT16)
        return np.ascontiguousarray(np.swapaxes(matrix, -1, -2))
