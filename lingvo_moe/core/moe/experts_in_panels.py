"""The experts in inference for TensorFlow's own kernels (core/op_by_op.py): each expert's weights in panels.

In a step of a search there are a few tokens, so what a layer costs is to read the weights of the experts that they
chose, and to start its operations: here tokens are partitioned among the experts and stitched together again, an
operation each.

Letters: N token, k choice rank, R = N k choices, E expert, M model, H hidden, n rows of an expert.
"""

import tensorflow as tf

from lingvo_moe.core.layers import panels
from lingvo_moe.core.nested_map import NestedMap

_MISSING = panels.FEWEST_ROWS - 1  # the most rows of company that an expert can need


def in_panels(theta: NestedMap) -> NestedMap:
    """wi and wo, each a list of the experts' panels, [P,M,W] and [P,H,W] (see layers/panels.py)."""
    return theta.Transform(lambda w: [panels.in_panels(one) for one in tf.unstack(w)])


def feed_forward_of_chosen(
    x_NM: tf.Tensor,
    expert_Nk: tf.Tensor,
    kept_Nk: tf.Tensor,
    gate_Nk: tf.Tensor,
    theta: NestedMap,
    hidden_dim: int,
) -> tf.Tensor:
    """The sum of gate * relu(x wi) wo over the experts of each token, [N,M].

    Args:
        x_NM: tokens, in the type of the weights.
        expert_Nk: int32, the experts of each token.
        kept_Nk: which of them count: those above zero.
        gate_Nk: what their outputs are multiplied with.
        theta: as `in_panels` gave it.
        hidden_dim: H.
    """
    tokens, (ranks, width) = tf.shape(x_NM)[0], (expert_Nk.shape[1], x_NM.shape[1])
    choices, nobody = tokens * ranks, len(theta.wi)
    expert_R = tf.reshape(tf.where(kept_Nk > 0, expert_Nk, nobody), [-1])
    # Copies of the first token make an expert's rows as many as a product should have (panels.py); what becomes
    # of them is left out.
    company = _company(expert_R, nobody)
    owner = tf.concat([expert_R, company], 0)
    number = tf.range(tf.size(owner))
    token = tf.where(number < choices, number // ranks, 0)
    numbers = tf.dynamic_partition(number, owner, nobody + 2)
    chosen = tf.dynamic_partition(token, owner, nobody + 2)
    outputs = []
    for wi, wo, token_n in zip(theta.wi, theta.wo, chosen[:nobody], strict=True):
        hidden_nH = tf.nn.relu(panels.product(tf.gather(x_NM, token_n), wi, hidden_dim))
        outputs.append(panels.product(hidden_nH, wo, width))
    outputs.append(tf.zeros([tf.size(numbers[nobody]), width], x_NM.dtype))
    rows = tf.dynamic_stitch(numbers[: nobody + 1], outputs)
    y_NkM = tf.reshape(rows[:choices], [tokens, ranks, width])
    return tf.reduce_sum(y_NkM * tf.cast(gate_Nk, x_NM.dtype)[:, :, tf.newaxis], 1)


def _company(expert_R: tf.Tensor, experts: int) -> tf.Tensor:
    """int32: an expert's number once for each row that it lacks, E + 1 for those that nobody needs.

    An expert without rows lacks none.
    """
    count_E = tf.math.unsorted_segment_sum(tf.ones_like(expert_R), expert_R, experts + 1)[:experts]
    full_ME = count_E + tf.range(_MISSING)[:, tf.newaxis] >= panels.FEWEST_ROWS
    owner_ME = tf.where((count_E == 0) | full_ME, experts + 1, tf.range(experts))
    return tf.reshape(owner_ME, [-1])
