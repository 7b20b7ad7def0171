"""The blocks of GGML's formats of few bits, as float32.

A block of 32 values has a scale d, in Q4_1 also a minimum m; one of 256 values has scales of its parts, which d
multiplies. All functions take uint8 [blocks, bytes] and return float32 [blocks, values].
"""

import numpy as np


def q8_0(block: np.ndarray) -> np.ndarray:
    """d, then 32 bytes: d * byte."""
    return _halves(block[:, :2]) * block[:, 2:].view(np.int8)


def q4_0(block: np.ndarray) -> np.ndarray:
    """d, then 32 times 4 bits: d * (bits - 8)."""
    return _halves(block[:, :2]) * (_nibbles(block[:, 2:]) - np.float32(8))


def q4_1(block: np.ndarray) -> np.ndarray:
    """d, m, then 32 times 4 bits: d * bits + m."""
    return _halves(block[:, :2]) * _nibbles(block[:, 4:]) + _halves(block[:, 2:4])


def q4_k(block: np.ndarray) -> np.ndarray:
    """d, e, 12 bytes with 6 bits of a scale s and of a minimum m for each of 8 parts, 256 times 4 bits:
    d * s * bits - e * m."""
    low, high, rest = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = np.concatenate([low & 63, (rest & 15) | ((low >> 6) << 4)], 1)
    minima = np.concatenate([high & 63, (rest >> 4) | ((high >> 6) << 4)], 1)
    bits = _nibbles(block[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32)
    d, e = _halves(block[:, :2]), _halves(block[:, 2:4])
    return ((d * scales)[..., None] * bits - (e * minima)[..., None]).reshape(-1, 256)


def q6_k(block: np.ndarray) -> np.ndarray:
    """256 times 4 low bits, then 2 high ones, 16 bytes that scale a part each, d: d * s * (bits - 32)."""
    low = block[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = block[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    bits = (low.reshape(-1, 2, 4, 32) | (high << 4)).astype(np.float32) - 32
    scales = _halves(block[:, 208:]) * block[:, 192:208].view(np.int8)
    return (scales[..., None] * bits.reshape(-1, 16, 16)).reshape(-1, 256)


def _halves(data: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 2] as float16, in float32 [blocks, 1]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """The low halves of all bytes of a row, then the high ones, in float32."""
    return np.concatenate([data & 15, data >> 4], 1).astype(np.float32)
