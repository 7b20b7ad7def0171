"""A shuffled order without memory: a keyed permutation of range(n), evaluated at any positions.

A Feistel network permutes the numbers of 2b bits that cover n; values that fall outside are sent through again
("cycle walking"), so what remains is a permutation of range(n). Shuffling a corpus of any size is then O(1) memory,
and resuming in the middle of an epoch is one evaluation.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Key = tuple[int | str, ...]  # anything that names a permutation, such as (seed, language, epoch)


def permute(index: np.ndarray, n: int, *key: int | str) -> np.ndarray:
    """Positions `index` of a permutation of range(n) that `key` selects.

    Args:
        index: int array, any shape, values in [0, n).

    Returns:
        An int64 array of the shape of `index`.
    """
    return permute_each([np.reshape(index, -1)], [n], [key])[0].reshape(np.shape(index))


def permute_each(
    indices: Sequence[np.ndarray], sizes: Sequence[int], keys: Sequence[Key]
) -> list[np.ndarray]:
    """`permute` of int arrays [N] with a size and a key each, at the price of one: many are often short."""
    ends = np.cumsum([index.size for index in indices])
    owner = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))  # the array of each position
    half = np.array([max(1, ((n - 1).bit_length() + 1) // 2) for n in sizes], np.uint64)
    round_keys = np.array([_round_keys(key) for key in keys])
    positions, size = np.concatenate(indices), np.array(sizes)[owner]
    if (wrong := np.flatnonzero((positions < 0) | (positions >= size))).size:
        first = wrong[0]
        raise ValueError(f"permute: position {positions[first]} must lie in [0, {size[first]})")

    def encrypt(x: np.ndarray, owner: np.ndarray) -> np.ndarray:
        bits = half[owner]
        mask = (np.uint64(1) << bits) - np.uint64(1)
        left, right = x >> bits, x & mask
        for round_key in round_keys[owner].T:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << bits) | right

    size = size.astype(np.uint64)
    out = encrypt(positions.astype(np.uint64), owner)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = encrypt(out[outside], owner[outside])
        outside = outside[out[outside] >= size[outside]]
    return np.split(out.astype(np.int64), ends[:-1])


def _round_keys(key: Key) -> np.ndarray:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _mix(x: np.ndarray) -> np.ndarray:
    """An avalanche of 64 bits (the finaliser of splitmix64)."""
    x = x * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
