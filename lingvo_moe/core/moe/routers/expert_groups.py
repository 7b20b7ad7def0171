"""Groups of experts, e.g. those of a host: a token's experts are in a few of them (DeepSeek-V3 2024, section 2.1.2).

Letters: G group of tokens, S token, E expert, Q group of experts.
"""

import tensorflow as tf

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.moe.slots import top_k
from lingvo_moe.core.tensors import shape_of


def check_groups(path: str, p: Params) -> None:
    """Raises ValueError, naming the parameter, where a router's groups are unequal or a token's experts do not fit."""
    if p.num_experts % p.expert_groups:
        raise ValueError(
            f"{path}.expert_groups={p.expert_groups}: {p.num_experts} experts do not fall into that many equal groups"
        )
    size = p.num_experts // p.expert_groups
    least = -(-p.k // size)
    if not least <= p.groups_per_token <= p.expert_groups:
        raise ValueError(
            f"{path}.groups_per_token={p.groups_per_token}: {p.k} experts of a token, in groups of {size}, take from "
            f"{least} to {p.expert_groups} groups"
        )


def in_best_groups(scores_GSE: tf.Tensor, num_groups: int, chosen: int) -> tf.Tensor:
    """The scores of the experts in each token's best groups, by the sum of their two best scores; -inf elsewhere.

    Args:
        scores_GSE: float32; no gradient flows.
        num_groups: Q, of consecutive experts.
        chosen: how many groups are best.
    """
    groups, tokens, experts = shape_of(scores_GSE)
    size = experts // num_groups
    by_group = tf.reshape(scores_GSE, [groups, tokens, num_groups, size])
    two_best = tf.math.top_k(tf.stop_gradient(by_group), min(2, size)).values
    _, index_GSk = top_k(tf.reduce_sum(two_best, -1), chosen)
    best_GSQ = tf.reduce_any(tf.one_hot(index_GSk, num_groups, True, False, dtype=tf.bool), 2)
    return tf.where(tf.repeat(best_GSQ, size, -1), scores_GSE, float("-inf"))
