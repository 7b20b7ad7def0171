"""Dispatch and combine: tokens to their experts' slots and back (Algorithm 2, lines 3 and 8).

Letters: G group, S token in group, k choice rank, E expert, C capacity slot, M model.
"""

from dataclasses import replace
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, scoped
from lingvo_moe.core.moe.experts import Rows
from lingvo_moe.core.moe.routers.base import Routing
from lingvo_moe.core.sharding import Axis, ShardingError, dims_mapping
from lingvo_moe.core.tensors import Kept, shape_of


class Dispatcher(BaseLayer):
    """Carries out a routing decision. It has no weights and makes no decision of its own.

    `Dispatch` gives each expert its tokens, sharded over devices along E; `Combine` brings the experts'
    outputs back to the tokens, sharded along G, weighted by their gates. A token without an expert gets
    zeros, so that its residual connection alone carries it on.
    """

    PART: ClassVar[str] = "dispatch_combine"
    KEEPS: ClassVar = {"dispatched": Kept.MOVED, "returned": Kept.PRODUCT | Kept.MOVED}
    # Whether experts have C slots a group. Where they have none, the router is given no capacity, in training too, and
    # drops nothing.
    LIMITED: ClassVar[bool] = True
    # Whether `Dispatch` gives `Rows`, for `GroupedFProp`, and not slots, for `FProp`.
    GIVES_ROWS: ClassVar[bool] = False

    def OwnLimit(self) -> str:
        """The parameter, as 'name=value', by which this dispatcher drops tokens that the router kept; '' for none."""
        return ""

    @scoped
    def Dispatch(self, routing: Routing, x_GSM: tf.Tensor) -> "tf.Tensor | Rows":
        """Expert inputs: slots [E,G,C,M], zeros where empty, for `Experts.FProp`; or `Rows`, for
        `Experts.GroupedFProp`."""
        raise NotImplementedError(f"{type(self).__name__}.Dispatch")

    @scoped
    def Combine(self, routing: Routing, tokens: "tf.Tensor | Rows") -> tf.Tensor:
        """The weighted sum of a token's experts, [G,S,M], from outputs in Dispatch's layout."""
        raise NotImplementedError(f"{type(self).__name__}.Combine")

    @classmethod
    def Flops(cls, G: int, S: int, E: int, C: int, M: int) -> int:
        """FLOPs of the matrix products of `Dispatch`, or of `Combine`; two for each multiply-add."""
        raise NotImplementedError(f"{cls.__name__}.Flops")

    @classmethod
    def ExpertRows(cls, G: int, S: int, E: int, C: int, k: int) -> int:
        """The number of rows that the experts compute: their slots, filled or not."""
        return E * G * C

    def GroupAxes(self) -> tuple[Axis, Axis]:
        """The mesh axes of G and M, for a manual region. Raises ShardingError: S is sharded."""
        group, token, model = dims_mapping("GSM", self.p.activation_split or {})
        if token is not None:
            raise ShardingError(
                f"{self.path}: activation_split shards S along {token!r}, but {type(self).__name__} "
                "needs the tokens of a group on one device; shard G, or use dispatcher='einsum'"
            )
        return group, model


class EinsumDispatcher(Dispatcher):
    """The paper's: one-hot masks of shape [G,S,E,C] and one einsum each way.

    Each way crosses devices once: the partitioner turns the change from G-split to E-split, and back,
    into one all-to-all of the slots. Where an expert has a slot for every token (C = S, or no limit), a
    token's slot does not depend on other tokens: each is then a group of its own with C = 1, the same sums
    without a mask that grows with S^2, and the layout is [E, G S, 1, M].
    """

    def Dispatch(self, routing: Routing, x_GSM: tf.Tensor) -> tf.Tensor:
        """See `Dispatcher`; in the type of `x_GSM`."""
        if has_slot_for_all(routing):
            routing = per_token(routing)
            x_GSM = self.Shard(tf.reshape(x_GSM, [-1, 1, x_GSM.shape[-1]]), "GSM")
        mask_GSEC = self._Mask(routing, routing.kept, x_GSM.dtype)
        inputs_GECM = tf.einsum("GSEC,GSM->GECM", mask_GSEC, x_GSM)
        # Annotated on both sides of the transposition, so that slots cross devices, never mask or tokens.
        inputs_GECM = self.Shard(inputs_GECM, "GECM")
        inputs_EGCM = self.Shard(tf.transpose(inputs_GECM, [1, 0, 2, 3]), "EGCM")
        return self.Keep(inputs_EGCM, "dispatched", "EGCM")

    def Combine(self, routing: Routing, tokens: tf.Tensor) -> tf.Tensor:
        """See `Dispatcher`; in the type of the expert outputs."""
        groups, size, _ = shape_of(routing.gate)
        if has_slot_for_all(routing):
            routing = per_token(routing)
        outputs_EGCM = self.Shard(tokens, "EGCM")
        outputs_GECM = self.Shard(tf.transpose(outputs_EGCM, [1, 0, 2, 3]), "GECM")
        outputs_GECM = self.Keep(outputs_GECM, "returned", "GECM")
        combine_GSEC = self._Mask(routing, routing.gate, outputs_GECM.dtype)
        y_GSM = tf.einsum("GSEC,GECM->GSM", combine_GSEC, outputs_GECM)
        return self.Shard(tf.reshape(y_GSM, [groups, size, y_GSM.shape[-1]]), "GSM")

    def _Mask(self, routing: Routing, values_GSk: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """[G,S,E,C] with each choice's value at its expert and slot, zeros elsewhere."""
        assert routing.capacity is not None
        num_slots = routing.num_experts * routing.capacity
        slot_GSk = routing.expert_index * routing.capacity + routing.position
        slot_GSk = tf.where(routing.kept > 0, slot_GSk, -1)  # -1: a row of zeros
        values_GSk = tf.cast(values_GSk, dtype)
        mask_GSX = tf.constant(0, dtype)
        for rank in range(slot_GSk.shape[-1]):
            hot_GSX = tf.one_hot(slot_GSk[:, :, rank], num_slots, dtype=dtype)
            mask_GSX += hot_GSX * values_GSk[:, :, rank : rank + 1]
        groups, size, _ = shape_of(slot_GSk)
        shape = [groups, size, routing.num_experts, routing.capacity]
        return self.Shard(tf.reshape(mask_GSX, shape), "GSEC")

    @classmethod
    def Flops(cls, G: int, S: int, E: int, C: int, M: int) -> int:
        """One of the two einsums."""
        return 2 * G * S * E * C * M if C < S else 2 * G * S * E * M


def has_slot_for_all(routing: Routing) -> bool:
    """Whether each expert has a slot for every token of a group."""
    return routing.capacity is None or routing.capacity == routing.gate.shape[1]


def per_token(routing: Routing) -> Routing:
    """Makes every token of a routing a group of one; correct only where nothing is dropped.

    A token's experts are all different, so slot 0 of each is free for it.
    """

    def one(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, [-1, 1, x.shape[-1]])

    slot = routing.expert_index if routing.position is None else routing.position
    return replace(
        routing,
        expert_index=one(routing.expert_index),
        gate=one(routing.gate),
        kept=one(routing.kept),
        position=one(slot - slot),
        capacity=1,
    )
