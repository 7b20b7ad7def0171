"""The MoE layer over pre-packed weights, for TensorFlow's kernels: each expert's weights in blocks of columns.

A step of a search has few tokens, so the cost of a layer is that of reading the weights of the experts that they
chose, and of starting its operations: one operation partitions tokens among experts, one stitches their results
together. Routers give the experts of each token and nothing else.

Letters: B batch, T time, G group, S token in group, N token, k choice rank, R = N k choices, E expert, M model, H
hidden, n rows of an expert.
"""

import tensorflow as tf

from lingvo_moe.core.base_layer import name_scope
from lingvo_moe.core.kernels import Activation
from lingvo_moe.core.moe.dispatch_dropless import DroplessDispatcher
from lingvo_moe.core.moe.experts import Experts
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.routers.base import needed
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.packed_layers import PackedFeedForward
from lingvo_moe.tasks.mt.decoding.packed_weights import FEWEST_ROWS, pack

_MOST_EXPERTS = 256  # a product for each of more would be a large graph
_MISSING = FEWEST_ROWS - 1  # the most padding rows that an expert can need


class PackedMoELayer:
    """A MoELayer with `Experts`, in inference, over packed weights: lists with an entry for each expert."""

    def __init__(self, layer: MoELayer):
        self._layer = layer
        shared = layer.children.get("shared_experts")
        self._shared = None if shared is None else PackedFeedForward(shared)

    @classmethod
    def Takes(cls, layer: MoELayer) -> bool:
        """Whether the layer can be packed: its experts compute what `Experts` do, at most 256, and it is dropless in
        inference."""
        return (
            layer.experts.COMPUTES == Experts.COMPUTES
            and layer.inference_dispatcher.COMPUTES == DroplessDispatcher.COMPUTES
            and layer.p.num_experts <= _MOST_EXPERTS
        )

    def Pack(self, theta: NestedMap, kind: str) -> NestedMap:
        """The layer's weights as FProp takes them; `kind` is one of packed_weights.WEIGHTS."""
        cast = self._layer.experts.Cast
        experts = theta.experts.Transform(
            lambda w: [pack(one, kind) for one in tf.unstack(cast(w))]
        )
        packed = NestedMap(router=theta.get("router", NestedMap()), experts=experts)
        if self._shared is not None:
            packed.shared_experts = self._shared.Pack(theta.shared_experts, kind)
        return packed

    def FProp(
        self,
        theta: NestedMap,
        x_BTM: tf.Tensor,
        paddings_BT: tf.Tensor,
        seed: None = None,
        context: NestedMap | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """See MoELayer; there is no seed, and there are no extras."""
        del seed
        layer = self._layer
        with name_scope(layer.path):
            context = needed(layer.path, layer.Needs(layer.p), context)
            x_BTM = tf.cast(x_BTM, layer.fprop_dtype)
            chosen = layer.router.Choose(theta.router, x_BTM, paddings_BT, context=context)
            x_NM, expert_Nk, kept_Nk, gate_Nk = (
                tf.reshape(x, [-1, x.shape[-1]])
                for x in (x_BTM, chosen.expert_index, chosen.wanted, chosen.Gate(chosen.wanted))
            )
            y_NM = feed_forward_of_chosen(
                x_NM, expert_Nk, kept_Nk, gate_Nk, theta.experts, layer.experts.activation
            )
            y_BTM = tf.reshape(y_NM, tf.shape(x_BTM))
            if self._shared is not None:
                y_BTM += self._shared.FProp(theta.shared_experts, x_BTM, paddings_BT)[0]
            return y_BTM, NestedMap()


def feed_forward_of_chosen(
    x_NM: tf.Tensor,
    expert_Nk: tf.Tensor,
    kept_Nk: tf.Tensor,
    gate_Nk: tf.Tensor,
    weights: NestedMap,
    activation: Activation,
) -> tf.Tensor:
    """The sum of gate * f(x wi) wo over the experts of each token, [N,M].

    Args:
        x_NM: tokens, in the type of the weights.
        expert_Nk: int32, the experts of each token.
        kept_Nk: which of them count: those above zero.
        gate_Nk: the factors of their outputs.
        weights: lists of each expert's packed weights: wo [H,M] and those that the activation names, [M,H].
        activation: f.
    """
    tokens, (ranks, width) = tf.shape(x_NM)[0], (expert_Nk.shape[1], x_NM.shape[1])
    choices, nobody = tokens * ranks, len(weights.wo)
    expert_R = tf.reshape(tf.where(kept_Nk > 0, expert_Nk, nobody), [-1])
    # Copies of the first token pad an expert's rows to as many as a product should have (packed_weights.py); their
    # results are left out.
    padding = _padding_rows(expert_R, nobody)
    owner = tf.concat([expert_R, padding], 0)
    number = tf.range(tf.size(owner))
    token = tf.where(number < choices, number // ranks, 0)
    numbers = tf.dynamic_partition(number, owner, nobody + 2)
    chosen = tf.dynamic_partition(token, owner, nobody + 2)
    outputs = []
    for e, token_n in enumerate(chosen[:nobody]):
        x_nM = tf.gather(x_NM, token_n)
        products = [weights[name][e].Product(x_nM) for name in activation.weights]
        outputs.append(weights.wo[e].Product(activation.function(*products)))
    outputs.append(tf.zeros([tf.size(numbers[nobody]), width], x_NM.dtype))
    rows = tf.dynamic_stitch(numbers[: nobody + 1], outputs)
    y_NkM = tf.reshape(rows[:choices], [tokens, ranks, width])
    return tf.reduce_sum(y_NkM * tf.cast(gate_Nk, x_NM.dtype)[:, :, tf.newaxis], 1)


def _padding_rows(expert_R: tf.Tensor, experts: int) -> tf.Tensor:
    """int32 [3 E]: an expert's number once for each padding row that it needs, E + 1 elsewhere.

    An expert without rows needs none.
    """
    count_E = tf.math.unsorted_segment_sum(tf.ones_like(expert_R), expert_R, experts + 1)[:experts]
    enough_nE = count_E + tf.range(_MISSING)[:, tf.newaxis] >= FEWEST_ROWS
    owner_nE = tf.where((count_E == 0) | enough_nE, experts + 1, tf.range(experts))
    return tf.reshape(owner_nE, [-1])
