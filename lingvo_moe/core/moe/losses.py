"""Auxiliary losses of routers: on how evenly experts are used, and on how large logits are.

Padding moves none of them. Sums are over the whole batch, however it is cut, and are scaled by numbers
known at run time only.

Letters: G group, S token in group, k choice rank, E expert.
"""

import math

import tensorflow as tf

_TINY = 1e-20  # of a squared mean: the variation of nothing but zeros is then 0


def load_balance(
    probabilities_GSE: tf.Tensor, count_GE: tf.Tensor, real_GS: tf.Tensor
) -> tf.Tensor:
    """E sum_e f_e P_e, averaged over groups: the Switch Transformer's loss (Fedus et al. 2021, section
    2.2, equations 4 to 6; its alpha is the caller's), for any number of choices.

    f_e is the share of the group's choices that fell on e, first and later ones alike, so that it sums
    to 1; P_e is the mean probability of e. The gradient flows through P_e alone. Perfect balance gives
    1 for any k and E. Of first choices alone this is E^2 times Algorithm 1's 1/E sum_e (c_e / S) m_e.
    Groups of nothing but padding do not count.

    Args:
        probabilities_GSE: softmax outputs, float32.
        count_GE: how many choices of real tokens fell on each expert, before drops, float32.
        real_GS: 1 for tokens, 0 for padding, float32.

    Returns:
        A float32 scalar.
    """
    tokens_G = tf.reduce_sum(real_GS, 1)
    choices_G = tf.reduce_sum(count_GE, 1)
    # Sums times a runtime scalar: the gradient of reduce_mean would be a host constant of this size.
    sum_GE = tf.reduce_sum(probabilities_GSE * real_GS[:, :, tf.newaxis], 1)
    per_G = tf.math.reciprocal(tf.maximum(tokens_G, 1.0) * tf.maximum(choices_G, 1.0))
    total = tf.reduce_sum(tf.stop_gradient(count_GE * per_G[:, tf.newaxis]) * sum_GE)
    groups = tf.reduce_sum(tf.cast(tokens_G > 0, tf.float32))
    return total * (float(count_GE.shape[-1]) * tf.math.reciprocal(tf.maximum(groups, 1.0)))


def log_partition(logits_GSE: tf.Tensor) -> tf.Tensor:
    """log sum_e exp(logit), [G,S], without overflow: softmax is exp(logit - this)."""
    largest_GS1 = tf.stop_gradient(tf.reduce_max(logits_GSE, -1, keepdims=True))
    sums_GS = tf.reduce_sum(tf.exp(logits_GSE - largest_GS1), -1)
    return tf.math.log(sums_GS) + largest_GS1[:, :, 0]


def z_loss(log_partition_GS: tf.Tensor, real_GS: tf.Tensor) -> tf.Tensor:
    """The mean over tokens of (log sum_e exp(logit_e))^2, which keeps logits small (ST-MoE: Zoph et
    al. 2022, section 3.3, equation 5). `real_GS` is 1 for tokens, 0 for padding."""
    per_token = tf.math.reciprocal(tf.maximum(tf.reduce_sum(real_GS), 1.0))
    return tf.reduce_sum(tf.square(log_partition_GS) * real_GS) * per_token


def cv_squared(x_E: tf.Tensor) -> tf.Tensor:
    """The squared coefficient of variation: variance / mean^2, over all E; 0 for nothing but zeros."""
    scale = 1.0 / x_E.shape[0]
    mean = tf.reduce_sum(x_E) * scale
    variance = tf.reduce_sum(tf.square(x_E - mean)) * scale
    return variance / tf.maximum(tf.square(mean), _TINY)


def importance(gate_GSk: tf.Tensor, index_GSk: tf.Tensor, num_experts: int) -> tf.Tensor:
    """[E]: the sum of each expert's gates over a batch (Shazeer et al. 2017, section 4, equation 6).

    Args:
        gate_GSk: the gates of the chosen experts before drops, 0 for padding, float32.
        index_GSk: the experts, int32.
        num_experts: E.
    """
    by_rank = [
        tf.reduce_sum(
            tf.one_hot(index_GSk[:, :, rank], num_experts) * gate_GSk[:, :, rank : rank + 1], [0, 1]
        )
        for rank in range(index_GSk.shape[-1])
    ]
    return tf.add_n(by_rank)


def smooth_load(
    clean_GSE: tf.Tensor,
    deviation_GSE: tf.Tensor,
    threshold_GSE: tf.Tensor,
    real_GS: tf.Tensor,
) -> tf.Tensor:
    """[E]: the expected number of tokens of each expert, were its own noise drawn anew (Shazeer et al.
    2017, appendix A, equations 8 to 10); unlike a count it has a gradient.

    P(x, e) = Phi((clean_e - threshold_e) / deviation_e) with Phi the normal distribution function.

    Args:
        clean_GSE: logits without noise.
        deviation_GSE: standard deviations of their noise, positive.
        threshold_GSE: what each noisy logit has to exceed: the k-th largest of the others.
        real_GS: 1 for tokens, 0 for padding.
    """
    z_GSE = (clean_GSE - threshold_GSE) / deviation_GSE
    chosen_GSE = 0.5 * tf.math.erfc(z_GSE * (-1.0 / math.sqrt(2.0)))
    return tf.reduce_sum(chosen_GSE * real_GS[:, :, tf.newaxis], [0, 1])
