"""Who gets a slot: choices take the seats of their experts in the order of Algorithm 1.

Letters: G group, S token in group, k choice rank, E expert, C capacity slot, and the queue that a
group's choices stand in: Q blocks of R choices, Q R = k S.
"""

import tensorflow as tf

# R. Within a block every choice is compared with every other; between blocks [E] counts are added
# up. Measured best, or close to it, for E from 8 to 2048.
_BLOCK = 32


def take_seats(
    expert_index_GSk: tf.Tensor,
    wanted_GSk: tf.Tensor,
    num_experts: int,
    capacity: int | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Seats every choice that wants a seat: all first choices of a group, in the order of its tokens,
    then all second choices, and so on (the paper's Algorithm 1, for any k).

    A choice's position is the number of choices of the same expert that came before it, whether or
    not those found the expert full. Each group is on its own, so this is cut along G like its inputs.
    Nothing is as large as [G,S,E].

    Args:
        expert_index_GSk: int32, the experts of each token, all different for one token.
        wanted_GSk: float32, 1 where a seat is asked for, 0 elsewhere (padding, for one).
        num_experts: E.
        capacity: C; None: there is a seat for all.

    Returns:
        position_GSk, int32: the slot within (group, expert), of no meaning where no seat is wanted;
        kept_GSk, float32: 1 where a seat is wanted and the position is below C. Counts are exact
        for S up to 2^24.
    """
    queue_GQR = _queue(expert_index_GSk, wanted_GSk)
    before_GQE = _before(_counts(queue_GQR, num_experts))
    choice_GQR = tf.maximum(queue_GQR, 0)
    position_GQR = tf.gather(before_GQE, choice_GQR, batch_dims=2)
    position_GQR += _earlier_in_block(queue_GQR)
    position_GSk = tf.cast(_unqueue(position_GQR, expert_index_GSk), tf.int32)
    kept_GSk = wanted_GSk
    if capacity is not None:
        kept_GSk *= tf.cast(position_GSk < capacity, tf.float32)
    return position_GSk, kept_GSk


def count_choices(
    expert_index_GSk: tf.Tensor, wanted_GSk: tf.Tensor, num_experts: int
) -> tf.Tensor:
    """float32 [G,E]: how many choices want a seat at each expert, kept or not. Arguments as above."""
    return tf.reduce_sum(_counts(_queue(expert_index_GSk, wanted_GSk), num_experts), 1)


def _queue(expert_index_GSk: tf.Tensor, wanted_GSk: tf.Tensor) -> tf.Tensor:
    """int32 [G,Q,R]: the choices in the order that they are seated in, -1 for those that are not."""
    index_GSk = tf.where(wanted_GSk > 0, expert_index_GSk, -1)
    groups, size, ranks = _shape(index_GSk)
    queue_GkS = tf.transpose(index_GSk, [0, 2, 1])
    queue_GkS = tf.pad(queue_GkS, [[0, 0], [0, 0], [0, -size % _BLOCK]], constant_values=-1)
    return tf.reshape(queue_GkS, [groups, ranks * ((size + _BLOCK - 1) // _BLOCK), _BLOCK])


def _unqueue(values_GQR: tf.Tensor, like_GSk: tf.Tensor) -> tf.Tensor:
    """The inverse of `_queue`."""
    groups, size, ranks = _shape(like_GSk)
    values_GkS = tf.reshape(values_GQR, [groups, ranks, size + -size % _BLOCK])
    return tf.transpose(values_GkS[:, :, :size], [0, 2, 1])


def _counts(queue_GQR: tf.Tensor, num_experts: int) -> tf.Tensor:
    """float32 [G,Q,E]: how often each expert occurs in a block."""
    experts_E = tf.range(num_experts)
    # Written out: sums along E's neighbour dimension are several times slower on a CPU.
    choices_GQ1 = tf.split(queue_GQR, _BLOCK, axis=2)
    return tf.add_n([tf.cast(tf.equal(c, experts_E), tf.float32) for c in choices_GQ1])


def _before(counts_GQE: tf.Tensor) -> tf.Tensor:
    """float32 [G,Q,E]: the sum of the blocks before each."""
    size = counts_GQE.shape[1]
    if not size:  # open, or none
        return tf.cumsum(counts_GQE, axis=1, exclusive=True)
    # Sums of 1, 2, 4, ... blocks. XLA makes a window of all Q of a cumsum, over which a TPU's compiler
    # takes 10 s a layer with E = 2048; on a CPU it is slower too, with XLA and without.
    before_GQE = tf.pad(counts_GQE[:, :-1], [[0, 0], [1, 0], [0, 0]])
    shift = 1
    while shift < size:
        before_GQE += tf.pad(before_GQE[:, :-shift], [[0, 0], [shift, 0], [0, 0]])
        shift *= 2
    return before_GQE


def _earlier_in_block(queue_GQR: tf.Tensor) -> tf.Tensor:
    """float32 [G,Q,R]: how many choices of the same block and expert come before each."""
    same_GQRR = tf.equal(queue_GQR[:, :, :, tf.newaxis], queue_GQR[:, :, tf.newaxis, :])
    place = tf.range(_BLOCK)
    earlier_RR = place[tf.newaxis, :] < place[:, tf.newaxis]
    return tf.reduce_sum(tf.cast(tf.logical_and(same_GQRR, earlier_RR), tf.float32), -1)


def _shape(x: tf.Tensor) -> list:
    """The shape, static where it is known: a served program may leave the batch open."""
    return [tf.shape(x)[i] if n is None else n for i, n in enumerate(x.shape)]
