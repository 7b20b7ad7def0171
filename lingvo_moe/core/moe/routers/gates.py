"""Gates: from a router's logits to the weights of the experts' outputs, by the name that the parameter `gate` has.

A new one is an entry of `GATES`: the routers with a gating network, their losses and metrics read that table alone.

Letters: G group, S token in group, E expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tensorflow as tf

from lingvo_moe.core import kernels

# Gives the logarithm of sum_e exp(logit_e), float32 [G,S], which losses may need too.
LogPartition = Callable[[], tf.Tensor]


@dataclass(frozen=True)
class Gate:
    """An increasing function of a token's logits.

    Attributes:
        scores: of float32 logits [G,S,n], from 0 to 1. In training its second argument may be the log partition of all
            logits; the function is then elementwise, so that it can be computed of some experts alone. In inference it
            is None, and a token's scores are rounded alike beside any number of others.
        log_scores: their logarithms, up to a number for each token.
        sums_to_1: whether the scores of all experts do.
    """

    scores: Callable[[tf.Tensor, LogPartition | None], tf.Tensor]
    log_scores: Callable[[tf.Tensor], tf.Tensor]
    sums_to_1: bool

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
