"""What a routing decision did, in numbers that padding cannot move.

Letters: G group, S token in group, k choice rank, E expert, C capacity slot.
"""

import tensorflow as tf

from lingvo_moe.core.moe.capacity import effective_capacity_factor
from lingvo_moe.core.nested_map import NestedMap


def routing_metrics(
    expert_index_GSk: tf.Tensor,
    gate_GSk: tf.Tensor,
    wanted_GSk: tf.Tensor,
    kept_GSk: tf.Tensor,
    real_GS: tf.Tensor,
    num_experts: int,
    capacity: int | None,
) -> NestedMap:
    """The metrics of one layer, over the real tokens of all groups.

    Args:
        expert_index_GSk: int32, the chosen experts.
        gate_GSk: the weights that the outputs are combined with, 0 where not kept.
        wanted_GSk: 1 where a real token asked for a slot (an unsampled second choice did not).
        kept_GSk: 1 where it got one.
        real_GS: 1 for tokens, 0 for padding.
        num_experts: E.
        capacity: C, or None where there is no limit.

    Returns:
        A NestedMap of float32 tensors, without gradients, ranks counted from 1:
        over_capacity_<rank>_ratio: the share of the choices asking for a slot that found the expert full;
        dispatch_<n>: the share of tokens sent to n experts, n = 0..k;
        mean_gate_<rank>: the mean weight of that choice; 1 minus their sum was lost to drops;
        expert_load_first [E]: the share of first choices, sums to 1;
        expert_load [E]: the share of filled slots, sums to 1;
        effective_capacity: E C / S, or E where nothing is ever dropped.
    """
    ranks = expert_index_GSk.shape[-1]
    per_token = tf.math.reciprocal(tf.maximum(tf.reduce_sum(real_GS), 1.0))
    metrics = NestedMap()
    kept_GSE = tf.constant(0.0)
    for rank in range(ranks):
        name = rank + 1
        wanted, kept = wanted_GSk[:, :, rank], kept_GSk[:, :, rank]
        asked = tf.reduce_sum(wanted)
        full = asked - tf.reduce_sum(kept)
        metrics[f"over_capacity_{name}_ratio"] = full / tf.maximum(asked, 1.0)
        metrics[f"mean_gate_{name}"] = tf.reduce_sum(gate_GSk[:, :, rank]) * per_token
        chosen_GSE = tf.one_hot(expert_index_GSk[:, :, rank], num_experts)
        kept_GSE += chosen_GSE * kept[:, :, tf.newaxis]
        if rank == 0:
            first_E = tf.reduce_sum(chosen_GSE * real_GS[:, :, tf.newaxis], [0, 1])
            metrics.expert_load_first = first_E * per_token
    dispatched_GS = tf.reduce_sum(kept_GSk, -1)
    for n in range(ranks + 1):
        hit_GS = tf.cast(tf.equal(dispatched_GS, float(n)), tf.float32) * real_GS
        metrics[f"dispatch_{n}"] = tf.reduce_sum(hit_GS) * per_token
    slots = tf.reduce_sum(kept_GSk)
    metrics.expert_load = tf.reduce_sum(kept_GSE, [0, 1]) / tf.maximum(slots, 1.0)
    metrics.effective_capacity = tf.constant(
        float(num_experts)
        if capacity is None
        else effective_capacity_factor(real_GS.shape[1], num_experts, capacity)
    )
    return metrics.Transform(tf.stop_gradient)
