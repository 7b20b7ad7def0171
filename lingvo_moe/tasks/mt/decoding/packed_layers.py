"""Feed-forward, softmax and repeated layers over pre-packed weights, for TensorFlow's kernels, in inference.

Letters: B batch, T time, M model, H hidden, V vocabulary, U some of its tokens.
"""

from typing import Any

import tensorflow as tf

from lingvo_moe.core.base_layer import name_scope
from lingvo_moe.core.layers.feed_forward import ACTIVATIONS, FeedForward
from lingvo_moe.core.layers.repeat import ALL, Chunk
from lingvo_moe.core.layers.softmax import Softmax
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.packed_weights import Packed, pack


class PackedFeedForward:
    """A FeedForward over packed weights: wo [H,M] and those that its activation names, [M,H]."""

    def __init__(self, layer: FeedForward):
        self._layer = layer

    def Pack(self, theta: NestedMap, kind: str) -> NestedMap:
        """The layer's weights as FProp takes them; `kind` is one of packed_weights.WEIGHTS."""
        return theta.Transform(lambda w: pack(self._layer.Cast(w), kind))

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        paddings: tf.Tensor,
        seed: None = None,
        context: NestedMap | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """See FeedForward; there is no seed."""
        del paddings, seed, context
        with name_scope(self._layer.path):
            activation, rows = (
                ACTIVATIONS[self._layer.p.activation],
                tf.reshape(x, [-1, x.shape[-1]]),
            )
            products = [theta[name].Product(rows) for name in activation.weights]
            y = theta.wo.Product(activation.function(*products))
            return tf.reshape(y, tf.shape(x)), NestedMap()


class PackedSoftmax:
    """A Softmax whose table, transposed and packed, is `theta.packed_table` [M,V].

    The table is the target embedding's, which also looks tokens up: theta holds `table` too.
    """

    def __init__(self, layer: Softmax):
        self._layer = layer

    def Pack(self, theta: NestedMap, kind: str) -> NestedMap:
        """theta and the packed table; `kind` is one of packed_weights.WEIGHTS."""
        return NestedMap(theta, packed_table=self._Packed(theta.table, kind))

    def OfTokens(self, theta: NestedMap, ids: tf.Tensor) -> NestedMap:
        """Returns the theta with which FProp computes the logits of the tokens `ids` only: float32 [B,T,U].

        The table's rows of these tokens are copied and packed as float32, also if the other weights are int8.

        Args:
            theta: from `Pack`.
            ids: int32 [U]. If U is unknown while tracing, it must be a multiple of packed_weights.WIDTH.
        """
        some = self._Packed(tf.gather(theta.table, ids), "float32")
        return NestedMap(theta, packed_table=some)

    def _Packed(self, table: tf.Tensor, kind: str) -> Packed:
        return pack(tf.transpose(self._layer.Cast(table)), kind)

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Logits of x [B,T,M]: float32 [B,T,V]."""
        with name_scope(self._layer.path):
            logits = theta.packed_table.Product(tf.reshape(x, [-1, x.shape[-1]]))
            shape = tf.concat([tf.shape(x)[:2], [logits.shape[1] or -1]], 0)
            return tf.reshape(tf.cast(logits, tf.float32), shape)


class UnrolledRepeat:
    """A Repeat in inference, unrolled: theta.body is a list of the weights of each repetition."""

    def __init__(self, body: Any):
        self.body = body

    def FProp(
        self,
        theta: NestedMap,
        carry: tf.Tensor,
        shared: NestedMap,
        seed: None = None,
        chunk: Chunk = ALL,
    ) -> tuple[tf.Tensor, NestedMap]:
        """See Repeat; there is no seed, all repetitions are run, and there are no extras."""
        del seed, chunk
        for one in theta.body:
            carry, _ = self.body.FProp(one, carry, shared)
        return carry, NestedMap()

    def SliceTheta(self, theta: NestedMap, i: int) -> NestedMap:
        """The weights of repetition i."""
        return theta.body[i]
