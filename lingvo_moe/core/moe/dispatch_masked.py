"""Dispatch and combine by masks alone: every expert gets every token, those of other experts as zeros.

The reference to read first. It computes E/k times what is needed and stores as much.

Letters: G group, S token in group, k choice rank, E expert, M model.
"""

import tensorflow as tf

from lingvo_moe.core.moe.dispatch import Dispatcher
from lingvo_moe.core.moe.routers.base import Routing


class MaskedDispatcher(Dispatcher):
    """A slot for each token at each expert, [E,G,S,M]: no index, no capacity of its own.

    Choices that the router dropped stay dropped, so the results equal those of the other dispatchers.
    """

    def Dispatch(self, routing: Routing, x_GSM: tf.Tensor) -> tf.Tensor:
        """See `Dispatcher`; slot s of an expert is for token s."""
        sent_GSE = _by_expert(routing, routing.kept, x_GSM.dtype)
        x_GESM = self.Shard(tf.einsum("GSE,GSM->GESM", sent_GSE, x_GSM), "GESM")
        x_EGSM = self.Shard(tf.transpose(x_GESM, [1, 0, 2, 3]), "EGSM")
        return self.Keep(x_EGSM, "dispatched", "EGSM")

    def Combine(self, routing: Routing, tokens: tf.Tensor) -> tf.Tensor:
        y_EGSM = self.Shard(tokens, "EGSM")
        y_GESM = self.Shard(tf.transpose(y_EGSM, [1, 0, 2, 3]), "GESM")
        y_GESM = self.Keep(y_GESM, "returned", "GESM")
        gate_GSE = _by_expert(routing, routing.gate, y_GESM.dtype)
        return self.Shard(tf.einsum("GSE,GESM->GSM", gate_GSE, y_GESM), "GSM")

    @classmethod
    def Flops(cls, G: int, S: int, E: int, C: int, M: int) -> int:
        """The FLOPs of one of the two einsums."""
        return 2 * G * S * E * M

    @classmethod
    def ExpertRows(cls, G: int, S: int, E: int, C: int, k: int) -> int:
        """All tokens, at each expert."""
        return E * G * S


def _by_expert(routing: Routing, values_GSk: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """[G,S,E]: each choice's value at its expert, 0 where there is no choice or it is not kept."""
    values_GSk = tf.cast(values_GSk * routing.kept, dtype)
    hot_GSkE = tf.one_hot(routing.expert_index, routing.num_experts, dtype=dtype)
    return tf.einsum("GSkE,GSk->GSE", hot_GSkE, values_GSk)
