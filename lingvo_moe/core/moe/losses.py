"""The load-balancing loss of Algorithm 1, line 13.

Letters: G group, S token in group, E expert.
"""

import tensorflow as tf


def load_balance(gates_GSE: tf.Tensor, first_GSE: tf.Tensor, real_GS: tf.Tensor) -> tf.Tensor:
    """1/E sum_e (c_e / S) m_e, averaged over groups.

    c_e counts the first choices of expert e, m_e is the mean gate of e, S the number of real tokens.
    The gradient flows through m_e alone. Perfect balance gives 1 / E^2. A group of nothing but
    padding does not count, so padding never moves the loss.

    Args:
        gates_GSE: softmax outputs, float32.
        first_GSE: one-hot first choices, all zero for padding, float32.
        real_GS: 1 for tokens, 0 for padding, float32.

    Returns:
        A float32 scalar.
    """
    num_experts = first_GSE.shape[-1]
    tokens_G = tf.reduce_sum(real_GS, 1)
    # Sums times a runtime scalar: the gradient of reduce_mean would be a host constant of this size.
    per_token_G1 = tf.math.reciprocal(tf.maximum(tokens_G, 1.0))[:, tf.newaxis]
    share_GE = tf.reduce_sum(first_GSE, 1) * per_token_G1
    mean_gate_GE = tf.reduce_sum(gates_GSE * real_GS[:, :, tf.newaxis], 1) * per_token_G1
    groups = tf.reduce_sum(tf.cast(tokens_G > 0, tf.float32))
    total = tf.reduce_sum(tf.stop_gradient(share_GE) * mean_gate_GE)
    return total * tf.math.reciprocal(tf.maximum(groups, 1.0) * float(num_experts))
