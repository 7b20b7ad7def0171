"""Packing tokens into slots by index and back, on one device: the code of dispatchers inside manual regions.

All functions gather rows, or sum rows into others, and so do their gradients: a slot belongs to one token
and choice, and each has the index of the other.

Letters: g groups of one device, S token in group, k choice rank, E expert, X slots of a group, M model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.tensors import custom_gradient, shape_of

_MOST_UNROLLED = 4  # choices of a token that are gathered one after another


@dataclass(frozen=True)
class Places:
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


def places_of(slot_gSk: tf.Tensor, num_slots: int) -> Places:
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
    return Places(slot_gSk, source_gX)


def sorted_places(
    expert_Sk: tf.Tensor, kept_Sk: tf.Tensor, num_experts: int
) -> tuple[Places, tf.Tensor]:
    """Places of choices sorted by expert, then by token and rank.

    Args:
        expert_Sk: int32 in 0..E-1 where kept.
        kept_Sk: bool; choices that are not kept have no slot.

    Returns:
        The places, of one group, and int32 [E], the slots of each expert; see `Kernels.sort_rows`.
    """
    key = tf.reshape(tf.where(kept_Sk, expert_Sk, num_experts), [-1])
    place, source, sizes_E = kernels.current().sort_rows(key, num_experts)
    slot_Sk = tf.where(kept_Sk, tf.reshape(place, shape_of(kept_Sk)), -1)
    return Places(slot_Sk[tf.newaxis], source[tf.newaxis]), sizes_E


def to_slots(x_gSM: tf.Tensor, places: Places) -> tf.Tensor:
    """[g,X,M]: each slot's token, zeros where it has none."""

    @custom_gradient
    def pack(x_gSM: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def grad(dslots_gXM: tf.Tensor) -> tf.Tensor:
            return _sum_of_slots(dslots_gXM, places)

        return _rows(x_gSM, _token(places)), grad

    return pack(x_gSM)


def weigh_slots(slots_gXM: tf.Tensor, gate_gSk: tf.Tensor, places: Places) -> tf.Tensor:
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


def of_slots(values_gSk: tf.Tensor, places: Places) -> tf.Tensor:
    """[g,X]: the value of the choice in each slot, 0 where there is none."""
    groups, size, ranks = shape_of(values_gSk)
    flat = tf.reshape(values_gSk, [groups, size * ranks])
    values = tf.gather(flat, tf.maximum(places.source_gX, 0), batch_dims=1)
    return tf.where(places.source_gX < 0, tf.zeros([], values.dtype), values)


def _sum_of_slots(
    slots_gXM: tf.Tensor, places: Places, gate_gSk: tf.Tensor | None = None
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


def _token(places: Places) -> tf.Tensor:
    """[g,X]: the token in each slot, or -1."""
    source_gX = places.source_gX
    return (
        source_gX if places.ranks == 1 else tf.where(source_gX < 0, -1, source_gX // places.ranks)
    )


def _of_choices(values_gX: tf.Tensor, places: Places) -> tf.Tensor:
    """[g,S,k]: the value of the slot of each choice, 0 where there is none."""
    values = tf.gather(values_gX, tf.maximum(places.slot_gSk, 0), batch_dims=1)
    return tf.where(places.slot_gSk < 0, tf.zeros([], values.dtype), values)


def _rows(x_gNM: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Rows of each group by index, [g, ..., M]; zeros where that is negative."""
    rows = tf.gather(x_gNM, tf.maximum(index, 0), batch_dims=1)
    return tf.where(index[..., tf.newaxis] >= 0, rows, tf.zeros([], rows.dtype))
