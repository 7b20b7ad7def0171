"""Dispatch and combine: tokens to their experts' slots and back (Algorithm 2, lines 3 and 8).

By einsum, or by gathering rows on each device (paper, section 3.2, "mixing manual and automatic sharding"). The
partitioner cannot know that a gather along S stays within its group, so it would have to expect every index on every
device. Each group lies on one device. So the gathers are in a manual region, on each device's own groups, and no mask
of shape [G,S,E,C] is made. Gradients gather rows too, or sum rows into others: a slot belongs to one token and choice,
and each has the index of the other.

Letters: G group (g: those of one device), S token in group, k choice rank, E expert, C capacity slot, X slots of a
group, M model; n tokens of a device, Q devices, B rows from one to another, e experts of one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, scoped
from lingvo_moe.core.moe.experts import Rows
from lingvo_moe.core.moe.routers.base import Routing
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Axis, Mesh, ShardingError, dims_mapping
from lingvo_moe.core.sharding.annotate import mesh_of
from lingvo_moe.core.sharding.manual import manual_region
from lingvo_moe.core.tensors import Kept, custom_gradient, shape_of

# The outputs [E,G,C,M], or Rows, of experts for such inputs.
RunExperts = Callable[[Any], Any]

_MOST_UNROLLED = 4  # choices of a token that are gathered one after another


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

    @scoped
    def Through(
        self, routing: Routing, x_GSM: tf.Tensor, experts: RunExperts, factor: float = 0.0
    ) -> tuple[tf.Tensor, NestedMap | None]:
        """Tokens through their experts: dispatch, experts, combine.

        Args:
            experts: computes the outputs of what `Dispatch` gives.
            factor: in inference, the layer's exchange_factor, for a dispatcher that can go by it.

        Returns:
            As Combine; and `Rows.metrics`, None of slots.
        """
        tokens = self.Dispatch(routing, x_GSM)
        y_GSM = self.Combine(routing, experts(tokens))
        return y_GSM, tokens.metrics if isinstance(tokens, Rows) else None

    @classmethod
    def Flops(cls, G: int, S: int, E: int, C: int, M: int) -> int:
        """FLOPs of the matrix products of `Dispatch`, or of `Combine`; two for each multiply-add."""
        raise NotImplementedError(f"{cls.__name__}.Flops")

    @classmethod
    def ExpertRows(cls, G: int, S: int, E: int, C: int, k: int) -> int:
        """The number of rows that the experts compute: their slots, filled or not."""
        return E * G * C

    def GroupAxes(self) -> tuple[Axis, Axis]:
        """The mesh axes of G and M, for a manual region; None on one device. Raises ShardingError: S is sharded."""
        group, token, model = dims_mapping("GSM", self.p.activation_split or {})
        if token is not None:
            raise ShardingError(
                f"{self.path}: activation_split shards S along {token!r}, but {type(self).__name__} "
                "needs the tokens of a group on one device; shard G, or use dispatcher='einsum'"
            )
        mesh = mesh_of(self.path, None)
        return there(group, mesh), there(model, mesh)


def there(axis: Axis, mesh: Mesh) -> Axis:
    """The axis; None on one device, whose mesh need not have the axes of split maps."""
    return None if mesh.size == 1 else axis


class SlotDispatcher(Dispatcher):
    """Gives each expert C slots a group; a subclass says how tokens come into slots, and slots back to tokens.

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
        # Annotated on both sides of the transposition, so that slots cross devices, never mask or tokens.
        slots_GECM = self.Shard(self._ToSlots(routing, x_GSM), "GECM")
        slots_EGCM = self.Shard(tf.transpose(slots_GECM, [1, 0, 2, 3]), "EGCM")
        return self.Keep(slots_EGCM, "dispatched", "EGCM")

    def Combine(self, routing: Routing, tokens: tf.Tensor) -> tf.Tensor:
        """See `Dispatcher`; in the type of the expert outputs."""
        groups, size, _ = shape_of(routing.gate)
        if has_slot_for_all(routing):
            routing = per_token(routing)
        slots_EGCM = self.Shard(tokens, "EGCM")
        slots_GECM = self.Shard(tf.transpose(slots_EGCM, [1, 0, 2, 3]), "GECM")
        slots_GECM = self.Keep(slots_GECM, "returned", "GECM")
        y_GSM = self._FromSlots(routing, slots_GECM)
        return self.Shard(tf.reshape(y_GSM, [groups, size, y_GSM.shape[-1]]), "GSM")

    def _ToSlots(self, routing: Routing, x_GSM: tf.Tensor) -> tf.Tensor:
        """Slots [G,E,C,M], zeros where empty."""
        raise NotImplementedError(f"{type(self).__name__}._ToSlots")

    def _FromSlots(self, routing: Routing, slots_GECM: tf.Tensor) -> tf.Tensor:
        """The weighted sum of each token's slots, [G,S,M]."""
        raise NotImplementedError(f"{type(self).__name__}._FromSlots")


class EinsumDispatcher(SlotDispatcher):
    """The paper's: one-hot masks of shape [G,S,E,C] and one einsum each way."""

    def _ToSlots(self, routing: Routing, x_GSM: tf.Tensor) -> tf.Tensor:
        mask_GSEC = self._Mask(routing, routing.kept, x_GSM.dtype)
        return tf.einsum("GSEC,GSM->GECM", mask_GSEC, x_GSM)

    def _FromSlots(self, routing: Routing, slots_GECM: tf.Tensor) -> tf.Tensor:
        combine_GSEC = self._Mask(routing, routing.gate, slots_GECM.dtype)
        return tf.einsum("GSEC,GECM->GSM", combine_GSEC, slots_GECM)

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


# --- by index


@dataclass(frozen=True)
class SlotIndex:
    """The slot of each choice, and the choice in each slot, on one device."""

    slot_gSk: tf.Tensor  # int32 in 0..X-1, the slot of each choice, or -1
    source_gX: tf.Tensor  # int32 in 0..S k-1, the choice s k + rank in each slot, or -1

    @property
    def ranks(self) -> int:
        """k."""
        return self.slot_gSk.shape[-1]

    @property
    def few_slots(self) -> bool:
        """Whether slots are summed into tokens, because most choices are not kept, as in expert choice.

        A choice then costs only its id; otherwise each token gathers its k slots.
        """
        _, size, ranks = self.slot_gSk.shape
        slots = self.source_gX.shape[1]
        return None not in (size, slots) and 4 * slots <= size * ranks


def places_of(slot_gSk: tf.Tensor, num_slots: int) -> SlotIndex:
    """Computes places from the slot of each choice: int32 in 0..X-1 and unique within its group, or -1."""
    groups, size, ranks = shape_of(slot_gSk)
    # One further slot for each group takes the choices without a slot.
    target_gSk = tf.where(slot_gSk < 0, num_slots, slot_gSk)
    target_gSk += (num_slots + 1) * tf.range(groups)[:, tf.newaxis, tf.newaxis]
    choice_gSk = tf.broadcast_to(
        1 + tf.reshape(tf.range(size * ranks), [1, size, ranks]), [groups, size, ranks]
    )
    source = tf.scatter_nd(
        tf.reshape(target_gSk, [-1, 1]), tf.reshape(choice_gSk, [-1]), [groups * (num_slots + 1)]
    )
    source_gX = tf.reshape(source, [groups, num_slots + 1])[:, :num_slots] - 1
    return SlotIndex(slot_gSk, source_gX)


def sorted_places(
    expert_Sk: tf.Tensor, kept_Sk: tf.Tensor, num_experts: int, fewest: int = 1
) -> tuple[SlotIndex, tf.Tensor]:
    """The slots of choices sorted by expert, then by token and rank.

    Args:
        expert_Sk: int32 in 0..E-1 where kept.
        kept_Sk: bool; choices that are not kept have no slot.
        fewest: the slots that an expert with choices has at least.

    Returns:
        The places, of one group, and int32 [E], the slots of each expert; see `Kernels.sort_rows`.
    """
    key = tf.reshape(tf.where(kept_Sk, expert_Sk, num_experts), [-1])
    place, source, sizes_E = kernels.current().sort_rows(key, num_experts, fewest)
    slot_Sk = tf.where(kept_Sk, tf.reshape(place, shape_of(kept_Sk)), -1)
    return SlotIndex(slot_Sk[tf.newaxis], source[tf.newaxis]), sizes_E


def blocks_to_send(
    expert_nk: tf.Tensor,
    kept_nk: tf.Tensor,
    shape: tuple[int, int],
    buffer: int,
    first: tf.Tensor | None = None,
) -> tuple[SlotIndex, tf.Tensor]:
    """The places of choices in Q blocks of B rows, one for each device; those of a block by expert.

    Args:
        shape: Q, and e, the experts of a device.
        buffer: B.
        first: int32 scalar, how many rows of each device to leave out; None: none.

    Returns:
        SlotIndex with Q B slots, and int32 [Q,e], how many rows of each block belong to each expert.
    """
    places, sizes_E = sorted_places(expert_nk, kept_nk, math.prod(shape))
    sizes_Qe = tf.reshape(sizes_E, shape)
    count_Q = tf.reduce_sum(sizes_Qe, 1)
    start_Q = tf.cumsum(count_Q, exclusive=True)
    # The place of each sorted row in its block.
    part_nk = tf.where(kept_nk, expert_nk, 0) // shape[1]
    at_nk = places.slot_gSk[0] - tf.gather(start_Q, part_nk)
    if first is not None:
        at_nk -= first
        kept_nk = tf.logical_and(kept_nk, at_nk >= 0)
        start_Q, count_Q = start_Q + first, count_Q - first
    fits_nk = tf.logical_and(kept_nk, at_nk < buffer)
    slot_nk = tf.where(fits_nk, part_nk * buffer + at_nk, -1)
    # The row at each place of a block.
    at_B = tf.range(buffer)[tf.newaxis]
    row_QB = tf.where(at_B < count_Q[:, tf.newaxis], start_Q[:, tf.newaxis] + at_B, -1)
    source_QB = tf.gather(places.source_gX[0], tf.maximum(row_QB, 0))
    source_QB = tf.where(row_QB < 0, -1, source_QB)
    ends_Qe = _within(tf.cumsum(sizes_Qe, 1), buffer, first)
    starts_Qe = _within(tf.cumsum(sizes_Qe, 1, exclusive=True), buffer, first)
    blocks = SlotIndex(slot_nk[tf.newaxis], tf.reshape(source_QB, [1, shape[0] * buffer]))
    return blocks, ends_Qe - starts_Qe


def _within(at: tf.Tensor, buffer: int, first: tf.Tensor | None) -> tf.Tensor:
    """Places among all rows as places in a buffer, which begins with the row `first`."""
    return tf.minimum(at if first is None else tf.maximum(at - first, 0), buffer)


def sorted_blocks(sizes_Qe: tf.Tensor, buffer: int) -> tuple[SlotIndex, tf.Tensor]:
    """The places of received rows, Q blocks of B, sorted by expert; and int32 [e], their numbers."""
    parts, experts = sizes_Qe.shape
    ends_Qe = tf.cumsum(sizes_Qe, 1)
    before_QBe = ends_Qe[:, tf.newaxis] <= tf.range(buffer)[tf.newaxis, :, tf.newaxis]
    expert_QB = tf.reduce_sum(tf.cast(before_QBe, tf.int32), -1)
    expert_X1 = tf.reshape(expert_QB, [parts * buffer, 1])
    return sorted_places(expert_X1, expert_X1 < experts, experts)


def to_slots(x_gSM: tf.Tensor, places: SlotIndex) -> tf.Tensor:
    """[g,X,M]: each slot's token, zeros where it has none."""

    @custom_gradient
    def pack(x_gSM: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def grad(dslots_gXM: tf.Tensor) -> tf.Tensor:
            return _sum_of_slots(dslots_gXM, places)

        return _rows(x_gSM, _token(places)), grad

    return pack(x_gSM)


def weigh_slots(slots_gXM: tf.Tensor, gate_gSk: tf.Tensor, places: SlotIndex) -> tf.Tensor:
    """[g,S,M]: the sum of each token's slots, weighted by its gates; choices without a slot add nothing.

    Gradients flow to slots and gates, in their types.
    """

    @custom_gradient
    def weigh(slots_gXM: tf.Tensor, gate_gSk: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def grad(dy_gSM: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            dy_gXM = _rows(dy_gSM, _token(places))
            gate_gX = tf.cast(of_slots(gate_gSk, places), dy_gXM.dtype)
            product_gXM = tf.cast(slots_gXM, tf.float32) * tf.cast(dy_gXM, tf.float32)
            dgate_gX = tf.reduce_sum(product_gXM, -1)
            dgate_gSk = _of_choices(dgate_gX, places)
            return dy_gXM * gate_gX[..., tf.newaxis], tf.cast(dgate_gSk, gate_gSk.dtype)

        return _sum_of_slots(slots_gXM, places, gate_gSk), grad

    return weigh(slots_gXM, gate_gSk)


def of_slots(values_gSk: tf.Tensor, places: SlotIndex) -> tf.Tensor:
    """[g,X]: the value of the choice in each slot, 0 where there is none."""
    groups, size, ranks = shape_of(values_gSk)
    flat = tf.reshape(values_gSk, [groups, size * ranks])
    values = tf.gather(flat, tf.maximum(places.source_gX, 0), batch_dims=1)
    return tf.where(places.source_gX < 0, tf.zeros([], values.dtype), values)


def _sum_of_slots(
    slots_gXM: tf.Tensor, places: SlotIndex, gate_gSk: tf.Tensor | None = None
) -> tf.Tensor:
    """[g,S,M]: the (weighted) sum of each token's slots."""
    groups, size, ranks = shape_of(places.slot_gSk)
    dtype = slots_gXM.dtype
    if places.few_slots:
        if gate_gSk is not None:
            gate_gX = tf.cast(of_slots(gate_gSk, places), dtype)
            slots_gXM = slots_gXM * gate_gX[..., tf.newaxis]
        token_gX = _token(places)
        # -1: nowhere
        token_gX = tf.where(token_gX < 0, -1, token_gX + size * tf.range(groups)[:, tf.newaxis])
        y = tf.math.unsorted_segment_sum(slots_gXM, token_gX, groups * size)
        return tf.reshape(y, [groups, size, slots_gXM.shape[-1]])
    weight_gSk = tf.cast(places.slot_gSk >= 0, dtype)
    if gate_gSk is not None:
        weight_gSk *= tf.cast(gate_gSk, dtype)
    slot_gSk = tf.maximum(places.slot_gSk, 0)
    if ranks > _MOST_UNROLLED:
        rows_gSkM = tf.gather(slots_gXM, slot_gSk, batch_dims=1)
        return tf.reduce_sum(rows_gSkM * weight_gSk[..., tf.newaxis], 2)
    return tf.add_n(
        [
            tf.gather(slots_gXM, slot_gSk[:, :, rank], batch_dims=1)
            * weight_gSk[:, :, rank : rank + 1]
            for rank in range(ranks)
        ]
    )


def _token(places: SlotIndex) -> tf.Tensor:
    """[g,X]: the token in each slot, or -1."""
    source_gX = places.source_gX
    return (
        source_gX if places.ranks == 1 else tf.where(source_gX < 0, -1, source_gX // places.ranks)
    )


def _of_choices(values_gX: tf.Tensor, places: SlotIndex) -> tf.Tensor:
    """[g,S,k]: the value of the slot of each choice, 0 where there is none."""
    values = tf.gather(values_gX, tf.maximum(places.slot_gSk, 0), batch_dims=1)
    return tf.where(places.slot_gSk < 0, tf.zeros([], values.dtype), values)


def _rows(x_gNM: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Rows of each group by index, [g, ..., M]; zeros where that is negative."""
    rows = tf.gather(x_gNM, tf.maximum(index, 0), batch_dims=1)
    return tf.where(index[..., tf.newaxis] >= 0, rows, tf.zeros([], rows.dtype))


class IndexDispatcher(SlotDispatcher):
    """Slots take their tokens, and tokens their slots, by index; equal to the einsum dispatcher.

    The communication is the same: one all-to-all of the slots each way, by annotations outside of the
    region. So are the layouts. Gradients are gathers too, since a slot belongs to one token and choice.
    Where few of the choices have a slot (k = E, in expert choice) slots are summed into their tokens
    instead.

    The groups have to divide evenly over their devices, and S must not be sharded: else there is a ShardingError.
    """

    def _ToSlots(self, routing: Routing, x_GSM: tf.Tensor) -> tf.Tensor:
        experts, capacity = _slots(routing)

        def gather(x_gSM: tf.Tensor, *choices_gSk: tf.Tensor) -> tf.Tensor:
            slots_gXM = to_slots(x_gSM, _places(experts, capacity, *choices_gSk))
            groups, _, dim = shape_of(slots_gXM)
            return tf.reshape(slots_gXM, [groups, experts, capacity, dim])

        group, model = self.GroupAxes()
        choice = (group, None, None)
        region = manual_region(
            gather, [(group, None, model), choice, choice, choice], (group, None, None, model)
        )
        return region(x_GSM, *_choices(routing))

    def _FromSlots(self, routing: Routing, slots_GECM: tf.Tensor) -> tf.Tensor:
        experts, capacity = _slots(routing)

        def gather(
            slots_gECM: tf.Tensor, gate_gSk: tf.Tensor, *choices_gSk: tf.Tensor
        ) -> tf.Tensor:
            local, _, _, dim = shape_of(slots_gECM)
            slots_gXM = tf.reshape(slots_gECM, [local, experts * capacity, dim])
            return weigh_slots(slots_gXM, gate_gSk, _places(experts, capacity, *choices_gSk))

        group, model = self.GroupAxes()
        choice = (group, None, None)
        region = manual_region(
            gather, [(group, None, None, model), *[choice] * 4], (group, None, model)
        )
        return region(slots_GECM, routing.gate, *_choices(routing))

    @classmethod
    def Flops(cls, G: int, S: int, E: int, C: int, M: int) -> int:
        """Moving rows multiplies nothing; the gates' products are elementwise."""
        return 0


def _slots(routing: Routing) -> tuple[int, int]:
    """(E, C)."""
    assert routing.capacity is not None
    return routing.num_experts, routing.capacity


def _choices(routing: Routing) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    return routing.expert_index, routing.position, routing.kept


def _places(
    experts: int,
    capacity: int,
    expert_index_gSk: tf.Tensor,
    position_gSk: tf.Tensor,
    kept_gSk: tf.Tensor,
) -> SlotIndex:
    slot_gSk = expert_index_gSk * capacity + position_gSk
    return places_of(tf.where(kept_gSk > 0, slot_gSk, -1), experts * capacity)
