"""A shuffled order without memory: a keyed permutation of range(n), evaluated at any positions.

A Feistel network permutes the numbers of 2b bits that cover n; values that fall outside are sent through again
("cycle walking"), so what remains is a permutation of range(n). Shuffling a corpus of any size is then O(1) memory,
and resuming in the middle of an epoch is one evaluation.
"""

import hashlib

import numpy as np

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permute(index: np.ndarray, n: int, *key: int | str) -> np.ndarray:
    """Positions `index` of a permutation of range(n) that `key` selects.

    Args:
        index: int array, any shape, values in [0, n).
        n: the size of the permuted range.
        key: anything that names the permutation, such as (seed, language, epoch).

    Returns:
        An int64 array of the shape of `index`.
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8")

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << half) | right

    flat = np.asarray(index).reshape(-1)
    if flat.size and not (flat.min() >= 0 and flat.max() < n):
        raise ValueError(f"permute: positions must lie in [0, {n}), got {flat.min()}..{flat.max()}")
    out = encrypt(flat.astype(np.uint64))
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = encrypt(out[outside])
        outside = outside[out[outside] >= n]
    return out.astype(np.int64).reshape(np.shape(index))


def _mix(x: np.ndarray) -> np.ndarray:
    """An avalanche of 64 bits (the finaliser of splitmix64)."""
    x = x * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
