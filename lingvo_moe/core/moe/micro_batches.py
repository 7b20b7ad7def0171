"""Losses and metrics of an MoE layer that sees one micro-batch: terms whose sum over micro-batches is the batch's.

A mean over tokens, or over groups with a token, weighs as much as the micro-batch's share of the batch's tokens or
groups. Shares are known before anything is computed: padding decides them. Two metrics are no such means:
`expert_load`, which is brought into one for the sum, and `dead_experts`; `combine` makes them from the sums.

These are exact: groups are the same in a micro-batch and in the batch. Two things are not. Noisy top-k's losses (the
variation of sums over all groups) are averaged over micro-batches; so are overflow rates where chance decides how many
second choices are sent.

Letters: E expert, L layer.
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core.moe.losses_and_metrics import AuxLoss, add_losses
from lingvo_moe.core.nested_map import NestedMap


def terms(
    losses: Sequence[AuxLoss], metrics: NestedMap, shares: NestedMap
) -> tuple[tf.Tensor, NestedMap]:
    """The auxiliary loss (float32 scalar) and the metrics of a layer as terms of the batch's.

    Args:
        losses: the terms of the router's auxiliary loss.
        metrics: of the layer, for the micro-batch alone.
        shares: float32 scalars `tokens` and `groups`.
    """
    shares = shares.Transform(tf.stop_gradient)
    out = metrics.Transform(lambda metric: metric * shares.tokens)
    # [E]: the filled slots of each expert for each token.
    out.expert_load *= metrics.experts_per_token
    scaled = [
        AuxLoss(loss.name, loss.value * shares[loss.over], loss.weight, loss.over)
        for loss in losses
    ]
    aux_loss = tf.add_n([tf.zeros([]), *(loss.value * loss.weight for loss in scaled)])
    add_losses(out, aux_loss, scaled)
    return aux_loss, out


def combine(sums: NestedMap) -> NestedMap:
    """The metrics of the batch from the sums of its micro-batches' terms, of one layer or of several, [L,...]."""
    metrics = NestedMap(sums)
    total = tf.reduce_sum(sums.expert_load, -1, keepdims=True)
    metrics.expert_load = sums.expert_load / tf.where(total > 0, total, 1.0)
    metrics.dead_experts = tf.reduce_mean(tf.cast(tf.equal(sums.expert_load, 0.0), tf.float32), -1)
    return metrics
