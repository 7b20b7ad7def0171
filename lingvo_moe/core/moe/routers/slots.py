"""Turns logits into slots: gates, the best experts of each token, and the slots of these choices (Algorithm 1).

A new gate is an entry of `GATES`: the routers with a gating network, their losses and metrics read that table alone.

Letters: G group, S token in group, k choice rank, E expert, C capacity slot. The queue of a group's choices has Q
blocks of R choices, Q R = k S.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.tensors import custom_gradient, shape_of

# Gives the logarithm of sum_e exp(logit_e), float32 [G,S], which losses may need too.
LogPartition = Callable[[], tf.Tensor]


@dataclass(frozen=True)
class Gate:
    """An increasing function of a token's logits."""

    # Of float32 logits [G,S,n], from 0 to 1. In training its second argument may be the log partition of all logits;
    # the function is then elementwise, so that it can be computed of some experts alone. In inference it is None, and
    # a token's scores are rounded alike beside any number of others.
    scores: Callable[[tf.Tensor, LogPartition | None], tf.Tensor]
    log_scores: Callable[[tf.Tensor], tf.Tensor]  # their logarithms, up to a number for each token
    sums_to_1: bool  # whether the scores of all experts do

    def Probabilities(self, scores_GSE: tf.Tensor) -> tf.Tensor:
        """The scores over their sum, for losses and metrics."""
        if self.sums_to_1:
            return scores_GSE
        return scores_GSE / tf.maximum(tf.reduce_sum(scores_GSE, -1, keepdims=True), 1e-20)


def _softmax(logits: tf.Tensor, log_z: LogPartition | None) -> tf.Tensor:
    return tf.nn.softmax(logits) if log_z is None else tf.exp(logits - log_z()[:, :, tf.newaxis])


def _sigmoid(logits: tf.Tensor, log_z: LogPartition | None) -> tf.Tensor:
    if log_z is not None:
        return tf.math.sigmoid(logits)
    independent = kernels.current().batch_independent
    return independent(tf.math.sigmoid, logits[..., tf.newaxis])[..., 0]


GATES: Mapping[str, Gate] = {
    "softmax": Gate(_softmax, lambda logits: logits, sums_to_1=True),
    "sigmoid": Gate(_sigmoid, tf.math.log_sigmoid, sums_to_1=False),
}


def expert_capacity(
    group_size: int, num_experts: int, capacity_factor: float, min_capacity: int
) -> int:
    """C, the slots of one expert for the tokens of one group.

    `capacity_factor * S / E`, rounded up, at least `min_capacity`, at most S. With a factor of 2 this
    is the paper's 2N / (G E) (section 2.2): as many slots as there are first and second choices.
    Lingvo rounds the quotient down and then up to a
    multiple of four. More than S slots could never fill, since a token takes at most one of them.

    Args:
        capacity_factor: slots a token, over all experts; 2.0 in the paper.
        min_capacity: the least C. With thousands of experts the quotient is 1 or 2, and an expert overflows
            by chance. See `effective_capacity_factor` for the cost.

    Raises:
        ValueError: a size, factor or minimum that is not positive.
    """
    for name, value in (
        ("group_size", group_size),
        ("num_experts", num_experts),
        ("capacity_factor", capacity_factor),
        ("min_capacity", min_capacity),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    wanted = capacity_factor * group_size / num_experts
    rounded_up = math.ceil(wanted - 1e-9)  # 1.1 * 10 is a little above 11 in floating point
    return min(max(rounded_up, min_capacity), group_size)


def effective_capacity_factor(group_size: int, num_experts: int, capacity: int) -> float:
    """E C / S: the capacity factor after rounding, to which the experts' work is proportional."""
    return num_experts * capacity / group_size


def top_k(scores_GSE: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The k largest scores of each token, the largest first; the lower index wins a tie.

    Returns:
        values_GSk, whose gradient goes to the chosen scores (the choice has none), and index_GSk, int32.
    """
    # One operation for any k, which XLA shards along G without communication. Its own gradient would be
    # a scatter, which XLA does not shard; `pick` has a sum instead.
    index_GSk = tf.math.top_k(tf.stop_gradient(scores_GSE), k).indices
    # This changes no index, but hides them from XLA, which would take slices of them (the choices of one
    # rank) from a sort of all E, twenty times as slow.
    index_GSk = tf.minimum(index_GSk, scores_GSE.shape[-1] - 1)
    return pick(scores_GSE, index_GSk), index_GSk


def pick(values_GSE: tf.Tensor, index_GSk: tf.Tensor) -> tf.Tensor:
    """[G,S,k]: the values of the experts in index_GSk, int32, all different for a token."""
    experts_E = tf.range(values_GSE.shape[-1])

    @custom_gradient
    def gathered(values_GSE: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def grad(dpicked_GSk: tf.Tensor) -> tf.Tensor:
            dvalues_GSE = tf.constant(0, dpicked_GSk.dtype)
            for rank in range(index_GSk.shape[-1]):
                one = slice(rank, rank + 1)
                here_GSE = tf.equal(index_GSk[:, :, one], experts_E)
                dvalues_GSE = tf.where(here_GSE, dpicked_GSk[:, :, one], dvalues_GSE)
            return dvalues_GSE

        return tf.gather(values_GSE, index_GSk, batch_dims=2), grad

    return gathered(values_GSE)


def replayed(recorded_GSk: tf.Tensor, own_GSk: tf.Tensor) -> tf.Tensor:
    """int32 [G,S,k]: the recorded experts of each token; its own where the first of them is negative."""
    return tf.where(recorded_GSk[:, :, :1] < 0, own_GSk, recorded_GSk)


def normalize(gate_GSk: tf.Tensor) -> tf.Tensor:
    """A token's gates over their sum; zeros where all are zero."""
    total_GS1 = tf.reduce_sum(gate_GSk, -1, keepdims=True)
    total_GS1 = tf.where(total_GS1 > 0, total_GS1, tf.constant(1.0))
    return gate_GSk * kernels.current().batch_independent(tf.math.reciprocal, total_GS1)


# R. Within a block every choice is compared with every other; between blocks [E] counts are summed.
# Measured to be the best size, or close to it, for E from 8 to 2048.
_BLOCK = 32


def assign_slots(
    expert_index_GSk: tf.Tensor,
    wanted_GSk: tf.Tensor,
    num_experts: int,
    capacity: int,
    priority_GS: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Assigns a slot to every choice that asks for one: first choices of a group in the order of its
    tokens, then second choices, and so on (the paper's Algorithm 1, for any k).

    A choice's position is the number of earlier choices of the same expert, whether or not these found
    the expert full. Groups are independent, so this is sharded along G like its inputs. No tensor is as
    large as [G,S,E].

    Args:
        expert_index_GSk: int32, the experts of each token, all different for one token.
        wanted_GSk: float32, 1 where a slot is asked for, 0 elsewhere, e.g. at padding.
        priority_GS: float32; tokens come in its order, the largest first, and where it is equal in their own.

    Returns:
        position_GSk, int32: the slot within (group, expert), undefined where none is asked for;
        kept_GSk, float32: 1 where a slot is asked for and the position is below C. Counts are exact
        for S up to 2^24.
    """
    if priority_GS is not None:
        order_GS = tf.math.top_k(priority_GS, priority_GS.shape[1]).indices
        place_GS = tf.math.top_k(-order_GS, priority_GS.shape[1]).indices  # of each token in it
        index, wanted = (
            tf.gather(x, order_GS, batch_dims=1) for x in (expert_index_GSk, wanted_GSk)
        )
        position, kept = (
            tf.gather(x, place_GS, batch_dims=1)
            for x in assign_slots(index, wanted, num_experts, capacity)
        )
        return position, kept
    queue_GQR = _queue(expert_index_GSk, wanted_GSk)
    before_GQE = sums_before(_counts(queue_GQR, num_experts))
    choice_GQR = tf.maximum(queue_GQR, 0)
    position_GQR = tf.gather(before_GQE, choice_GQR, batch_dims=2)
    position_GQR += _earlier_in_block(queue_GQR)
    position_GSk = tf.cast(_unqueue(position_GQR, expert_index_GSk), tf.int32)
    return position_GSk, wanted_GSk * tf.cast(position_GSk < capacity, tf.float32)


def count_choices(
    expert_index_GSk: tf.Tensor, wanted_GSk: tf.Tensor, num_experts: int
) -> tf.Tensor:
    """float32 [G,E]: how many choices ask for a slot of each expert, kept or not. Arguments as above."""
    return tf.reduce_sum(_counts(_queue(expert_index_GSk, wanted_GSk), num_experts), 1)


def _queue(expert_index_GSk: tf.Tensor, wanted_GSk: tf.Tensor) -> tf.Tensor:
    """int32 [G,Q,R]: the choices in the order in which they get slots, -1 for those that ask for none."""
    index_GSk = tf.where(wanted_GSk > 0, expert_index_GSk, -1)
    groups, size, ranks = shape_of(index_GSk)
    queue_GkS = tf.transpose(index_GSk, [0, 2, 1])
    queue_GkS = tf.pad(queue_GkS, [[0, 0], [0, 0], [0, -size % _BLOCK]], constant_values=-1)
    return tf.reshape(queue_GkS, [groups, ranks * ((size + _BLOCK - 1) // _BLOCK), _BLOCK])


def _unqueue(values_GQR: tf.Tensor, like_GSk: tf.Tensor) -> tf.Tensor:
    """The inverse of `_queue`."""
    groups, size, ranks = shape_of(like_GSk)
    values_GkS = tf.reshape(values_GQR, [groups, ranks, size + -size % _BLOCK])
    return tf.transpose(values_GkS[:, :, :size], [0, 2, 1])


def _counts(queue_GQR: tf.Tensor, num_experts: int) -> tf.Tensor:
    """float32 [G,Q,E]: how often each expert occurs in a block."""
    experts_E = tf.range(num_experts)
    # Written out: sums along E's neighbour dimension are several times slower on a CPU.
    choices_GQ1 = tf.split(queue_GQR, _BLOCK, axis=2)
    return tf.add_n([tf.cast(tf.equal(c, experts_E), tf.float32) for c in choices_GQ1])


def sums_before(counts_GQE: tf.Tensor) -> tf.Tensor:
    """[G,Q,E], as `counts_GQE`: the sum of the blocks before each."""
    size = counts_GQE.shape[1]
    if not size:  # open, or none
        return tf.cumsum(counts_GQE, axis=1, exclusive=True)
    # Sums of 1, 2, 4, ... blocks. XLA turns a cumsum into a window of all Q, on which the TPU compiler spends
    # 10 s a layer with E = 2048; on a CPU it is slower too, with XLA and without.
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
