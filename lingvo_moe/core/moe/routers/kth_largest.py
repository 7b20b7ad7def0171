"""The k-th largest of many numbers, in operations that XLA shards along G like any other.

Letters: G group, S token in group, E expert.
"""

import tensorflow as tf


def kth_largest_bits(bits_GSE: tf.Tensor, k: int, num_bits: int) -> tf.Tensor:
    """int32 [G,E]: the k-th largest of the S numbers of each expert, found bit by bit.

    Instead of a sort, a few sums over S: much less work on a CPU, and no gather where S is not
    sharded.

    Args:
        bits_GSE: int32 below 2^num_bits; negative ones do not count.
        k: at least 1.
        num_bits: of the numbers; for float32 from 0 to 1, whose bits order them, 30.

    Returns:
        0 where fewer than k numbers count.
    """

    def step(bit: tf.Tensor, found_GE: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        larger_GE = found_GE + tf.bitwise.left_shift(1, bit)
        at_least = tf.cast(bits_GSE >= larger_GE[:, tf.newaxis, :], tf.float32)
        return bit - 1, tf.where(tf.reduce_sum(at_least, 1) >= k, larger_GE, found_GE)

    # Zeros, sharded as the numbers are.
    start_GE = tf.reduce_min(tf.bitwise.bitwise_and(bits_GSE, 0), 1)
    _, found_GE = tf.while_loop(lambda bit, _: bit >= 0, step, (num_bits - 1, start_GE))
    return found_GE
