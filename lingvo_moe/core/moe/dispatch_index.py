"""Dispatch and combine by gathering rows on each device (paper, section 3.2, "mixing manual and automatic
sharding").

The partitioner cannot know that a gather along S stays within its group, so it would have to expect every
index on every device. Each group lies on one device. So the gathers are in a manual region, on each
device's own groups, and no mask of shape [G,S,E,C] is made.

Letters: G group (g: those of one device), S token in group, k choice rank, E expert, C capacity slot,
X = E C (the slots of a group), M model.
"""

import tensorflow as tf

from lingvo_moe.core.moe.dispatch import Dispatcher, has_slot_for_all, per_token
from lingvo_moe.core.moe.packing import Places, places_of, to_slots, weigh_slots
from lingvo_moe.core.moe.routers.base import Routing
from lingvo_moe.core.sharding.manual import manual_region
from lingvo_moe.core.tensors import shape_of


class IndexDispatcher(Dispatcher):
    """Slots take their tokens, and tokens their slots, by index; equal to the einsum dispatcher.

    The communication is the same: one all-to-all of the slots each way, by annotations outside of the
    region. So are the layouts. Gradients are gathers too, since a slot belongs to one token and choice.
    Where few of the choices have a slot (k = E, in expert choice) slots are summed into their tokens
    instead.

    The groups have to divide evenly over their devices, and S must not be sharded.
    """

    def Dispatch(self, routing: Routing, x_GSM: tf.Tensor) -> tf.Tensor:
        """See `Dispatcher`; in the type of `x_GSM`.

        Raises ShardingError: groups that do not divide evenly over their devices.
        """
        if has_slot_for_all(routing):
            routing = per_token(routing)
            x_GSM = self.Shard(tf.reshape(x_GSM, [-1, 1, x_GSM.shape[-1]]), "GSM")
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
        slots_GECM = region(x_GSM, *_choices(routing))
        slots_GECM = self.Shard(slots_GECM, "GECM")
        slots_EGCM = self.Shard(tf.transpose(slots_GECM, [1, 0, 2, 3]), "EGCM")
        return self.Keep(slots_EGCM, "dispatched", "EGCM")

    def Combine(self, routing: Routing, tokens: tf.Tensor) -> tf.Tensor:
        """See `Dispatcher`; in the type of the expert outputs. Raises as Dispatch."""
        groups, size, _ = shape_of(routing.gate)
        if has_slot_for_all(routing):
            routing = per_token(routing)
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
        slots_EGCM = self.Shard(tokens, "EGCM")
        slots_GECM = self.Shard(tf.transpose(slots_EGCM, [1, 0, 2, 3]), "GECM")
        slots_GECM = self.Keep(slots_GECM, "returned", "GECM")
        y_GSM = region(slots_GECM, routing.gate, *_choices(routing))
        return self.Shard(tf.reshape(y_GSM, [groups, size, y_GSM.shape[-1]]), "GSM")

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
) -> Places:
    slot_gSk = expert_index_gSk * capacity + position_gSk
    return places_of(tf.where(kept_gSk > 0, slot_gSk, -1), experts * capacity)
