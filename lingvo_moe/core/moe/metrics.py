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
    probabilities_GSE: tf.Tensor | None = None,
    ranked: bool = True,
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
        probabilities_GSE: what the gating network made of each token, all E of it, summing to 1 over
            E: before any top-k, normalisation or drop. None where nothing was learnt.
        ranked: False where k = E and expert_index[..., e] = e: experts are then not choices in an
            order, and what is counted by rank is left out.

    Returns:
        A NestedMap of float32 tensors, without gradients, ranks counted from 1:
        over_capacity_ratio: the share of all choices asking for a slot that found the expert full;
        experts_per_token: the mean number of experts that a token was sent to;
        dispatch_0: the share of tokens sent to no expert;
        expert_load [E]: the share of filled slots, sums to 1;
        dead_experts: the share of experts without a token;
        effective_capacity: E C / S, or E where nothing is ever dropped.

        With probabilities:
        importance [E]: the mean probability, sums to 1;
        gate_entropy: of a token's probabilities, the mean; nats, 0 to log E.

        If ranked:
        over_capacity_<rank>_ratio: the same share, of the choices of this rank;
        dispatch_<n>: the share of tokens sent to n experts, n = 0..k;
        mean_gate_<rank>: the mean weight of that choice; 1 minus their sum was lost to drops;
        expert_load_first [E]: the share of first choices, sums to 1.
    """
    per_token = tf.math.reciprocal(tf.maximum(tf.reduce_sum(real_GS), 1.0))
    if ranked:
        metrics, load_E = _by_rank(
            expert_index_GSk, gate_GSk, wanted_GSk, kept_GSk, real_GS, num_experts
        )
    else:
        metrics, load_E = NestedMap(), tf.reduce_sum(kept_GSk, [0, 1])
        metrics.dispatch_0 = _share_sent_to(0, tf.reduce_sum(kept_GSk, -1), real_GS)
    asked, slots = tf.reduce_sum(wanted_GSk), tf.reduce_sum(load_E)
    metrics.over_capacity_ratio = (asked - slots) / tf.maximum(asked, 1.0)
    metrics.experts_per_token = slots * per_token
    metrics.expert_load = load_E / tf.maximum(slots, 1.0)
    dead = tf.reduce_sum(tf.cast(tf.equal(load_E, 0.0), tf.float32))
    metrics.dead_experts = dead * (1.0 / num_experts)
    metrics.effective_capacity = tf.constant(
        float(num_experts)
        if capacity is None
        else effective_capacity_factor(real_GS.shape[1], num_experts, capacity)
    )
    if probabilities_GSE is not None:
        sum_E = tf.reduce_sum(probabilities_GSE * real_GS[:, :, tf.newaxis], [0, 1])
        entropy_GS = -tf.reduce_sum(tf.math.xlogy(probabilities_GSE, probabilities_GSE), -1)
        metrics.importance = sum_E * per_token
        metrics.gate_entropy = tf.reduce_sum(entropy_GS * real_GS) * per_token
    return metrics.Transform(tf.stop_gradient)


def add_losses(metrics: NestedMap, aux_loss: tf.Tensor, losses: dict[str, tf.Tensor]) -> None:
    """Into a router's metrics, without gradients: `aux_loss`, and each loss unweighted as `loss_<name>`."""
    metrics.aux_loss = tf.stop_gradient(aux_loss)
    for name, loss in losses.items():
        metrics[f"loss_{name}"] = tf.stop_gradient(loss)


def _by_rank(
    expert_index_GSk: tf.Tensor,
    gate_GSk: tf.Tensor,
    wanted_GSk: tf.Tensor,
    kept_GSk: tf.Tensor,
    real_GS: tf.Tensor,
    num_experts: int,
) -> tuple[NestedMap, tf.Tensor]:
    """What tells first choices from later ones, and [E], the slots that each expert has filled."""
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
        metrics[f"dispatch_{n}"] = _share_sent_to(n, dispatched_GS, real_GS)
    return metrics, tf.reduce_sum(kept_GSE, [0, 1])


def _share_sent_to(n: int, dispatched_GS: tf.Tensor, real_GS: tf.Tensor) -> tf.Tensor:
    """The share of tokens that n experts got."""
    per_token = tf.math.reciprocal(tf.maximum(tf.reduce_sum(real_GS), 1.0))
    hit_GS = tf.cast(tf.equal(dispatched_GS, float(n)), tf.float32) * real_GS
    return tf.reduce_sum(hit_GS) * per_token
