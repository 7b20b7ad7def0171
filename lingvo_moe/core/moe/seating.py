"""Who gets a slot: choices take the seats of their experts in the order of Algorithm 1.

Letters: G group, S token in group, k choice rank, E expert, C capacity slot.
"""

import tensorflow as tf


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
    seated_GE = None
    positions = []
    for rank in range(expert_index_GSk.shape[-1]):
        choice_GSE = tf.one_hot(expert_index_GSk[:, :, rank], num_experts)
        seats_GSE = choice_GSE * wanted_GSk[:, :, rank : rank + 1]
        before_GSE = tf.cumsum(seats_GSE, axis=1, exclusive=True)
        if seated_GE is None:
            seated_GE = tf.reduce_sum(seats_GSE, 1)
        else:
            before_GSE += seated_GE[:, tf.newaxis, :]
            seated_GE += tf.reduce_sum(seats_GSE, 1)
        positions.append(tf.reduce_sum(before_GSE * choice_GSE, -1))
    position_GSk = tf.stack(positions, -1)
    kept_GSk = wanted_GSk
    if capacity is not None:
        kept_GSk *= tf.cast(position_GSk < capacity, tf.float32)
    return tf.cast(position_GSk, tf.int32), kept_GSk
