"""Dispatch and combine by gathering rows on each device (paper, section 3.2, "mixing manual and automatic
sharding").

A gather along S does not say that it stays within its group, so the partitioner would have to expect
every index everywhere. We know that it stays: groups are whole on their device. So the gathers are
done in a manual region, on each device's own groups, and no mask of shape [G,S,E,C] is made.

Letters: G group (g: those of one device), S token in group, k choice rank, E expert, C capacity slot,
X = E C (the slots of a group), N rows, M model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from lingvo_moe.core.moe.dispatch import Dispatcher, per_token, room_for_all, shape_of
from lingvo_moe.core.moe.routers.base import Routing
from lingvo_moe.core.sharding import Axis, DimsMapping, ShardingError, dims_mapping
from lingvo_moe.core.sharding.manual import manual_region


class IndexDispatcher(Dispatcher):
    """Slots take their tokens, and tokens their slots, by index; equal to the einsum dispatcher.

    What crosses devices is the same: one all-to-all of the slots each way, by annotations outside of
    the region. The layouts are the einsum dispatcher's too. Gradients are gathers again, since a slot
    belongs to one token and choice.

    The groups have to divide evenly over their devices, and S must not be cut.
    """

    def Dispatch(self, routing: Routing, x_GSM: tf.Tensor) -> tf.Tensor:
        """See `Dispatcher`; in the type of `x_GSM`.

        Raises:
            ShardingError: groups that do not divide evenly over their devices.
        """
        if room_for_all(routing):
            routing = per_token(routing)
            x_GSM = self.Shard(tf.reshape(x_GSM, [-1, 1, x_GSM.shape[-1]]), "GSM")
        experts, capacity = _slots(routing)

        def gather(x_gSM: tf.Tensor, *choices_gSk: tf.Tensor) -> tf.Tensor:
            places = _places(experts * capacity, capacity, *choices_gSk)
            slots_gXM = _to_slots(x_gSM, places)
            groups, _, dim = shape_of(slots_gXM)
            return tf.reshape(slots_gXM, [groups, experts, capacity, dim])

        group, model = self._Axes()
        choice = (group, None, None)
        region = manual_region(
            gather, [(group, None, model), choice, choice, choice], (group, None, None, model)
        )
        slots_GECM = region(x_GSM, *_choices(routing))
        slots_GECM = self.Shard(slots_GECM, "GECM")
        return self.Shard(tf.transpose(slots_GECM, [1, 0, 2, 3]), "EGCM")

    def Combine(self, routing: Routing, expert_outputs_EGCM: tf.Tensor) -> tf.Tensor:
        """See `Dispatcher`; in the type of the expert outputs. Raises as Dispatch."""
        groups, size, _ = shape_of(routing.gate)
        if room_for_all(routing):
            routing = per_token(routing)
        experts, capacity = _slots(routing)

        def gather(
            slots_gECM: tf.Tensor, gate_gSk: tf.Tensor, *choices_gSk: tf.Tensor
        ) -> tf.Tensor:
            places = _places(experts * capacity, capacity, *choices_gSk)
            local, _, _, dim = shape_of(slots_gECM)
            slots_gXM = tf.reshape(slots_gECM, [local, experts * capacity, dim])
            gate_gSk = tf.cast(gate_gSk, slots_gXM.dtype)
            rows = [
                _from_slots(slots_gXM, places, rank) * gate_gSk[:, :, rank : rank + 1]
                for rank in range(places.slot_gSk.shape[-1])
            ]
            return tf.add_n(rows)

        group, model = self._Axes()
        choice = (group, None, None)
        region = manual_region(
            gather, [(group, None, None, model), *[choice] * 4], (group, None, model)
        )
        slots_EGCM = self.Shard(expert_outputs_EGCM, "EGCM")
        slots_GECM = self.Shard(tf.transpose(slots_EGCM, [1, 0, 2, 3]), "GECM")
        y_GSM = region(slots_GECM, routing.gate, *_choices(routing))
        return self.Shard(tf.reshape(y_GSM, [groups, size, y_GSM.shape[-1]]), "GSM")

    @classmethod
    def Flops(cls, G: int, S: int, E: int, C: int, M: int) -> int:
        """Moving rows multiplies nothing; the gates' products are elementwise."""
        return 0

    def _Axes(self) -> tuple[Axis, Axis]:
        """The mesh axes that G and M are cut along in a region."""
        mapping: DimsMapping = dims_mapping("GSM", self.p.activation_split or {})
        if mapping[1] is not None:
            raise ShardingError(
                f"{self.path}: activation_split cuts S along {mapping[1]!r}, but the index dispatcher "
                "needs the tokens of a group on one device; cut G, or use dispatcher='einsum'"
            )
        return mapping[0], mapping[2]


@dataclass(frozen=True)
class _Places:
    """Who sits where, both ways, on one device.

    Attributes:
        slot_gSk: int32 in 0..X-1, the slot of each choice, or -1.
        source_gX: int32 in 0..S k-1, the choice s k + rank in each slot, or -1.
    """

    slot_gSk: tf.Tensor
    source_gX: tf.Tensor


def _slots(routing: Routing) -> tuple[int, int]:
    """(E, C)."""
    assert routing.capacity is not None
    return routing.num_experts, routing.capacity


def _choices(routing: Routing) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    return routing.expert_index, routing.position, routing.kept


def _places(
    num_slots: int,
    capacity: int,
    expert_index_gSk: tf.Tensor,
    position_gSk: tf.Tensor,
    kept_gSk: tf.Tensor,
) -> _Places:
    slot_gSk = expert_index_gSk * capacity + position_gSk
    slot_gSk = tf.where(kept_gSk > 0, slot_gSk, -1)
    groups, size, ranks = shape_of(slot_gSk)
    # A slot more for each group takes all that are not kept.
    target_gSk = tf.where(slot_gSk < 0, num_slots, slot_gSk)
    target_gSk += (num_slots + 1) * tf.range(groups)[:, tf.newaxis, tf.newaxis]
    choice_gSk = tf.broadcast_to(
        1 + tf.reshape(tf.range(size * ranks), [1, size, ranks]), [groups, size, ranks]
    )
    source = tf.scatter_nd(
        tf.reshape(target_gSk, [-1, 1]), tf.reshape(choice_gSk, [-1]), [groups * (num_slots + 1)]
    )
    source_gX = tf.reshape(source, [groups, num_slots + 1])[:, :num_slots] - 1
    return _Places(slot_gSk, source_gX)


def _to_slots(x_gSM: tf.Tensor, places: _Places) -> tf.Tensor:
    """[g,X,M]: each slot's token, or zeros."""
    ranks = places.slot_gSk.shape[-1]

    @tf.custom_gradient
    def to_slots(x_gSM: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def grad(dslots_gXM: tf.Tensor) -> tf.Tensor:
            return tf.add_n([_from_slots(dslots_gXM, places, rank) for rank in range(ranks)])

        return _rows(x_gSM, tf.where(places.source_gX < 0, -1, places.source_gX // ranks)), grad

    return to_slots(x_gSM)


def _from_slots(slots_gXM: tf.Tensor, places: _Places, rank: int) -> tf.Tensor:
    """[g,S,M]: the slot of each token's choice of that rank, or zeros."""
    ranks = places.slot_gSk.shape[-1]

    @tf.custom_gradient
    def from_slots(slots_gXM: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def grad(drows_gSM: tf.Tensor) -> tf.Tensor:
            source_gX = places.source_gX
            own = tf.logical_and(source_gX >= 0, tf.equal(source_gX % ranks, rank))
            return _rows(drows_gSM, tf.where(own, source_gX // ranks, -1))

        return _rows(slots_gXM, places.slot_gSk[:, :, rank]), grad

    return from_slots(slots_gXM)


def _rows(x_gNM: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Rows of each group by index, [g, ..., M]; zeros where that is negative."""
    rows = tf.gather(x_gNM, tf.maximum(index, 0), batch_dims=1)
    return tf.where(index[..., tf.newaxis] >= 0, rows, tf.zeros([], rows.dtype))
