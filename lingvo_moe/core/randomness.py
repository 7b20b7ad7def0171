"""Stateless random numbers that XLA can partition: a value depends on its seed and its position, never on the
devices.

TensorFlow's own stateless generators become one opaque XLA operation that a partitioner can only
replicate, so every device would compute the dropout mask of the whole batch. Here a hash of the seed and
of each position, keyed twice, is written as elementwise operations on an iota, which XLA partitions like
any other elementwise computation. It is short because a model draws at some forty places, each compiled
for forward, recomputation and backward: with Threefry-2x32-13 instead, a third of a training step's
compile time was the generator's. It is meant for dropout, routing and initial values, not for
cryptography.

A seed is an int32 tensor of shape [2]. `seed=None`, where a layer takes it, means inference:
nothing random happens.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_draws: set[str] = set()  # the names of the functions that draw


def make_seed(global_seed: int | tf.Tensor, step: int | tf.Tensor) -> tf.Tensor:
    """The seed of one training step, int32 [2], from the experiment's seed and the step
    (scalars)."""
    start = tf.stack([tf.cast(global_seed, tf.int32), tf.constant(0, tf.int32)])
    return fold_in(start, step)


def fold_in(seed: tf.Tensor, data: int | str | tf.Tensor) -> tf.Tensor:
    """A new seed, int32 [2], from a seed and a name, a number or a scalar integer tensor.

    A vector of n integers gives n seeds, [n, 2]. A seed is no random number: the words of neighbouring seeds depend on
    each other, and drawing from them mixes their bits. Names, of which a model folds hundreds, take three operations.
    """
    if isinstance(data, str):
        name = data.encode()
        words = [zlib.crc32(name), zlib.crc32(name, 0x9E3779B1)]
        seed = tf.bitwise.bitwise_xor(seed, tf.bitwise.left_shift(seed, tf.constant(5, tf.int32)))
        return seed + tf.constant(np.array(words, np.uint32).view(np.int32))
    data = tf.bitcast(tf.cast(data, tf.int32), tf.uint32)
    k0, k1 = _keys(seed)
    a = _mix(_xor(k0, data * _word(0x9E3779B1)))
    b = _mix(_xor(k1 + a, data + _word(0x7F4A7C15)))
    return tf.bitcast(tf.stack([a + b, b], axis=-1), tf.int32)


def bits(seed: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Uniform uint32 of a static shape.

    With seeds [n, 2] the first dimension must be n, and slice i equals the result of seed i alone for the
    rest of the shape.

    Raises:
        ValueError: a shape that is not static, or with more than 2^32 elements beyond the first
            dimension that a seed covers.
    """
    seed = tf.convert_to_tensor(seed, tf.int32)
    shape = [int(n) if n is not None else None for n in shape]
    if None in shape:
        raise ValueError(f"random numbers need a static shape, got {shape}")
    inner = shape[seed.shape.rank :]
    if math.prod(inner) > 2**32:
        raise ValueError(f"random numbers: {inner} has more than 2^32 elements")
    if tf.executing_eagerly():
        return _bits(seed, shape)
    # One operation of a graph: building some sixty for each of a model's draws took a third of the time of tracing.
    traced = _traced_bits(tuple(seed.shape), tuple(shape))
    return tf.raw_ops.PartitionedCall(args=[seed], Tout=[tf.uint32], f=traced, name="random_bits")[
        0
    ]


def is_draw(op: tf.Operation) -> bool:
    """Whether an operation of a graph is a draw of `bits`: from a seed [2], or from seeds [n, 2] for n rows."""
    return op.type == "PartitionedCall" and op.get_attr("f").name in _draws


@functools.lru_cache(maxsize=1024)
def _traced_bits(seed_shape: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """The TensorFlow function of a seed for `_bits` of a shape; of no graph, so that all of them can call it."""
    with tf.init_scope(), tf.device(None):
        function = tf.function(lambda seed: _bits(seed, shape), autograph=False)
        traced = function.get_concrete_function(tf.TensorSpec(seed_shape, tf.int32))
    _draws.add(tf.compat.as_str(traced.name))
    return traced


def _bits(seed: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    stacked = seed.shape.rank - 1
    inner = range(stacked, len(shape))
    keys = [tf.reshape(k, k.shape + [1] * (len(shape) - stacked)) for k in _keys(seed)]
    # The counter is (index in the first dimension, flat index in the others). The key joins each
    # one-dimensional iota before they are broadcast: a full-size counter without it would be a
    # constant, which TensorFlow folds on the host.
    runtime_zero = _xor(keys[0], keys[0])
    low = high = runtime_zero
    for dim in inner:
        along = tf.cast(tf.range(shape[dim], dtype=tf.int32), tf.uint32)
        along = tf.reshape(along, [-1 if i == dim else 1 for i in range(len(shape))])
        if dim == stacked and len(inner) > 1:
            high = along + runtime_zero
        else:
            low = low + (along * tf.constant(math.prod(shape[dim + 1 :]), tf.uint32) + runtime_zero)
    # Keyed before and between two bijections that mix well: rows (`high`) get keys of their own.
    row = _mix(_xor(keys[0], high * _word(0x9E3779B1)))
    return _mix(_xor(_mix(low + row), _mix(keys[1] + high)))


def word_of_each(seeds: tf.Tensor) -> tf.Tensor:
    """A uniform uint32 of each of n seeds [n, 2], [n]: `bits(seeds, [n])`, also where n is not static."""
    k0, k1 = _keys(seeds)
    return _mix(_xor(_mix(_mix(k0)), _mix(k1)))


def uniform(seed: tf.Tensor, shape: Sequence[int], dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Uniform floats in [0, 1) of a static shape."""
    return tf.cast(fractions(bits(seed, shape)), dtype)


def fractions(words: tf.Tensor) -> tf.Tensor:
    """The highest 24 bits of uint32 words as float32 in [0, 1)."""
    fraction = tf.bitwise.right_shift(words, tf.constant(8, tf.uint32))
    return tf.cast(tf.bitcast(fraction, tf.int32), tf.float32) * (1.0 / (1 << 24))


def normal(seed: tf.Tensor, shape: Sequence[int], dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Standard normal floats, truncated at 4.9 deviations, by the inverse error function."""
    return _inverse_normal(uniform(seed, shape), 1.0 - 2.0**-20, dtype)


def truncated_normal(seed: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Standard normal floats conditioned on lying within two standard deviations."""
    return _inverse_normal(uniform(seed, shape), math.erf(2 / math.sqrt(2)), tf.float32)


def kept(
    seed: tf.Tensor, shape: Sequence[int], rate: float, rows: tf.Tensor | None = None
) -> tf.Tensor:
    """The mask of dropout, bool of a static shape: false with probability `rate`.

    Args:
        seed: int32 [2].
        rate: in (0, 1).
        rows: int32, of the shape without its last dimension; each row then has the mask of row `rows[...]` of a
            matrix, wherever it lies.
    """
    threshold = tf.constant(min(round(rate * 2**32), 2**32 - 1), tf.uint32)
    drawn = bits(seed, shape) if rows is None else _bits_of_rows(seed, rows, shape[-1])
    return drawn >= threshold


def _bits_of_rows(seed: tf.Tensor, rows: tf.Tensor, width: int) -> tf.Tensor:
    """uint32 [..., width]: rows of `bits(seed, [n, width])`, by their numbers, int32 [...]."""
    k0, k1 = _keys(seed)
    number = tf.bitcast(rows, tf.uint32)[..., tf.newaxis]
    row = _mix(_xor(k0, number * _word(0x9E3779B1)))
    column = tf.cast(tf.range(width), tf.uint32)
    return _mix(_xor(_mix(column + row), _mix(k1 + number)))


def _inverse_normal(u: tf.Tensor, mass: float, dtype: tf.DType) -> tf.Tensor:
    centred = (2.0 * u - (1.0 - 2.0**-24)) * mass  # symmetric about 0
    return tf.cast(tf.math.erfinv(centred) * math.sqrt(2.0), dtype)


def _keys(seed: tf.Tensor) -> list[tf.Tensor]:
    """The two words of a seed [2], or of each of the seeds [n, 2]."""
    return tf.unstack(tf.bitcast(tf.convert_to_tensor(seed, tf.int32), tf.uint32), axis=-1)


def _mix(x: tf.Tensor) -> tf.Tensor:
    """Thomas Wang's 32-bit hash: a bijection of shifts, sums and xors.

    No products: a TPU has none of 32-bit integers, and XLA's replacement for them takes longer to compile
    than the rest of the model.
    """
    left = tf.bitwise.left_shift
    x = tf.bitwise.invert(x) + left(x, _word(15))
    x = _fold(x, 12)
    x = _fold(x + left(x, _word(2)), 4)
    return _fold(x + left(x, _word(3)) + left(x, _word(11)), 16)


def _fold(x: tf.Tensor, shift: int) -> tf.Tensor:
    return _xor(x, tf.bitwise.right_shift(x, _word(shift)))


def _xor(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(a, b)


def _word(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint32)
