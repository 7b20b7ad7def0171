"""The best k experts of each token, and their gates.

Letters: G group, S token in group, k choice rank, E expert.
"""

from collections.abc import Callable

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.gradients import custom_gradient


def top_k(scores_GSE: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The k largest scores of each token, the largest first; the lower index wins a tie.

    Returns:
        values_GSk, whose gradient goes to the scores that they are (the choice has none), and
        index_GSk, int32.
    """
    # One operation for any k, which XLA cuts along G without communication. Its own gradient would be
    # a scatter, which is not cut; `pick` has a sum instead.
    index_GSk = tf.math.top_k(tf.stop_gradient(scores_GSE), k).indices
    # No index is larger, but XLA does not know: where it sees slices of the indices (the choices of
    # one rank), it takes them from a sort of all E, twenty times as long.
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


def normalize(gate_GSk: tf.Tensor) -> tf.Tensor:
    """A token's gates over their sum; zeros where all are zero."""
    total_GS1 = tf.reduce_sum(gate_GSk, -1, keepdims=True)
    total_GS1 = tf.where(total_GS1 > 0, total_GS1, tf.constant(1.0))
    return gate_GSk * kernels.current().batch_independent(tf.math.reciprocal, total_GS1)
