"""Dispatch and combine without capacity: rows sorted by expert, in groups of any size (Gale et al. 2022,
"MegaBlocks: Efficient Sparse Training with Mixture-of-Experts").

Nothing is dropped and no slot stays empty: experts compute a row for each kept choice. Over devices, each
device packs its rows by the device of their expert, an all-to-all sends them there, and the receiver sorts
them by expert; the way back is the same.

Letters: G group, S token in group, k choice rank, N tokens (n: those of one device), D devices, Q those
that share the experts, B rows from one device to another, R rows of a device, E expert, e experts of a
device, M model.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.moe.dispatch import (
    Dispatcher,
    SlotIndex,
    of_slots,
    sorted_places,
    there,
    to_slots,
    weigh_slots,
)
from lingvo_moe.core.moe.experts import ROWS, Product, Rows
from lingvo_moe.core.moe.routers.base import Routing
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Axis, DimsMapping, ShardingError, dims_mapping
from lingvo_moe.core.sharding.annotate import mesh_of, mesh_split
from lingvo_moe.core.sharding.letters import axes_of
from lingvo_moe.core.sharding.manual import all_reduce, manual_region
from lingvo_moe.core.sharding.mesh import traced_slices
from lingvo_moe.core.tensors import shape_of

_OTHERWISE = (
    "as the dropless dispatcher requires; use dispatcher='einsum' and, for inference, "
    "inference_dispatcher='einsum'"
)


class DroplessDispatcher(Dispatcher):
    """Gives `Rows` to the experts: a row for each choice that is kept.

    Shapes are static, so the buffer between each two devices holds the most rows that one could send the
    other, n min(k, e), of which n k / Q are used on average: all-to-alls move the buffer, experts compute
    the rows. `device_capacity_factor` bounds the buffer; rows that do not fit are dropped.

    The tokens have to divide evenly over the devices, and the experts over those that they are sharded over,
    which must be among the tokens' own.
    """

    LIMITED: ClassVar[bool] = False
    GIVES_ROWS: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "device_capacity_factor",
            0.0,
            "The buffer from one device to another, in multiples of the mean number of rows; 0: as large as "
            "it can need to be.",
            checks.NOT_NEGATIVE,
        )
        return p

    def OwnLimit(self) -> str:
        factor = self.p.device_capacity_factor
        return f"device_capacity_factor={factor}" if factor else ""

    def Dispatch(self, routing: Routing, x_GSM: tf.Tensor) -> Rows:
        """See `Dispatcher`; in the type of `x_GSM`.

        Args:
            routing: its positions and capacity are ignored.

        Raises:
            ShardingError: see the class.
        """
        if traced_slices():
            raise ShardingError(
                f"{self.path}: the dropless dispatcher exchanges rows between devices itself, and cannot do so within "
                "the stages of a pipeline; choose task.moe.dispatcher=index"
            )
        layout = self._LayoutOf(routing)
        x_NM = _flat(x_GSM)
        # A row for each token: its experts, which of them are kept, and the ids of its choices.
        choices = tuple(_flat(x) for x in (routing.expert_index, routing.kept, _numbers(routing)))
        tokens, ranks = x_NM.shape[0], routing.kept.shape[-1]
        expected = None if tokens is None else tokens * ranks // layout.num_devices
        # The experts of a token are then on its own device, however many devices there are.
        if layout.owners == 1:
            return self._Pack(layout, x_NM, choices, expected, routing.fewest_rows)
        return self._Send(layout, x_NM, choices, expected)

    def _Pack(
        self,
        layout: "_Layout",
        x_NM: tf.Tensor,
        choices_Nk: tuple[tf.Tensor, ...],
        expected: int | None,
        fewest: int,
    ) -> Rows:
        """Rows where every device has all experts."""
        devices, num_experts = layout.devices, layout.local_experts

        def pack(
            x_nM: tf.Tensor, expert_nk: tf.Tensor, kept_nk: tf.Tensor, number_nk: tf.Tensor
        ) -> tuple:
            places, sizes_E = sorted_places(expert_nk, kept_nk > 0, num_experts, fewest)
            rows = to_slots(x_nM[tf.newaxis], places)
            number_1R = of_slots(number_nk[tf.newaxis], places)
            return rows, sizes_E[tf.newaxis], number_1R, places.slot_gSk[0], places.source_gX

        ins = [(devices, layout.model), *[(devices, None)] * 3]
        region = manual_region(pack, ins, [(devices, None, layout.model), *[(devices, None)] * 4])
        rows_DRM, sizes_DE, number_DR, *notes = region(x_NM, *choices_Nk)
        rows_DRM = self.Keep(rows_DRM, "dispatched", ROWS)
        return Rows(rows_DRM, sizes_DE, number_DR, layout.Product(expected), tuple(notes))

    def _Send(
        self,
        layout: "_Layout",
        x_NM: tf.Tensor,
        choices_Nk: tuple[tf.Tensor, ...],
        expected: int | None,
    ) -> Rows:
        """Rows where experts are on other devices: packed by device, sent there, and sorted by expert."""
        devices, model, tokens = layout.devices, layout.model, x_NM.shape[0]
        ranks = choices_Nk[0].shape[1]
        assert tokens is not None  # checked by `_LayoutOf`
        buffer = self._BufferRows(tokens // layout.num_devices, ranks, layout)

        def send(
            x_nM: tf.Tensor, expert_nk: tf.Tensor, kept_nk: tf.Tensor, number_nk: tf.Tensor
        ) -> tuple:
            places, sizes_Qe = _for_devices(expert_nk, kept_nk > 0, layout, buffer)
            rows = to_slots(x_nM[tf.newaxis], places)
            rows = tf.reshape(rows, [1, layout.owners, buffer, x_nM.shape[1]])
            number_1X = of_slots(number_nk[tf.newaxis], places)
            number_1QB = tf.reshape(number_1X, [1, layout.owners, buffer])
            notes = (places.slot_gSk[0], places.source_gX)
            return rows, sizes_Qe[tf.newaxis], number_1QB, *notes

        def receive(rows_1QBM: tf.Tensor, sizes_1Qe: tf.Tensor, number_1QB: tf.Tensor) -> tuple:
            places, sizes_e = _from_devices(sizes_1Qe[0], buffer)
            rows = tf.reshape(rows_1QBM, [1, layout.owners * buffer, rows_1QBM.shape[-1]])
            number_1R = of_slots(tf.reshape(number_1QB, [1, layout.owners * buffer, 1]), places)
            notes = (places.slot_gSk[0], places.source_gX)
            return to_slots(rows, places), sizes_e[tf.newaxis], number_1R, *notes

        narrow = (devices, None, None)
        outs = [(devices, None, None, model), narrow, narrow, *[(devices, None)] * 2]
        region = manual_region(send, [(devices, model), *[(devices, None)] * 3], outs)
        sent_DQBM, sizes_DQe, number_DQB, *notes = region(x_NM, *choices_Nk)
        metrics = NestedMap()
        if buffer < layout.largest_buffer(tokens // layout.num_devices, ranks):
            fit = tf.cast(tf.reduce_sum(sizes_DQe), tf.float32)
            asked = tf.reduce_sum(choices_Nk[1])
            metrics.over_device_capacity_ratio = (asked - fit) / tf.maximum(asked, 1.0)
        outs = [(devices, None, model), *[(devices, None)] * 4]
        region = manual_region(receive, [(devices, None, None, model), narrow, narrow], outs)
        rows_DRM, sizes_De, number_DR, *more = region(
            *(layout.Exchange(x) for x in (sent_DQBM, sizes_DQe, number_DQB))
        )
        rows_DRM = self.Keep(rows_DRM, "dispatched", ROWS)
        notes = (*notes, *more)
        return Rows(rows_DRM, sizes_De, number_DR, layout.Product(expected), notes, metrics)

    def Combine(self, routing: Routing, tokens: Rows) -> tf.Tensor:
        """See `Dispatcher`; in the type of the expert outputs."""
        groups, size, _ = shape_of(routing.gate)
        layout = self._LayoutOf(routing)
        devices, model = layout.devices, layout.model
        narrow = (devices, None)
        rows_DXM = tokens.values
        slot_Nk, source_DX, *received = tokens.notes
        if received:

            def send(rows_1RM: tf.Tensor, slot_X1: tf.Tensor, source_1R: tf.Tensor) -> tf.Tensor:
                places = SlotIndex(slot_X1[tf.newaxis], source_1R)
                one = tf.cast(slot_X1[tf.newaxis] >= 0, rows_1RM.dtype)
                rows = weigh_slots(rows_1RM, one, places)
                return tf.reshape(rows, [1, layout.owners, -1, rows_1RM.shape[-1]])

            wide = (devices, None, None, model)
            region = manual_region(send, [(devices, None, model), narrow, narrow], wide)
            back_DQBM = layout.Exchange(region(rows_DXM, *received))
            rows_DXM = tf.reshape(back_DQBM, [layout.num_devices, -1, back_DQBM.shape[-1]])
        rows_DXM = self.Keep(rows_DXM, "returned", ROWS)

        def weigh(
            rows_1XM: tf.Tensor, gate_nk: tf.Tensor, slot_nk: tf.Tensor, source_1X: tf.Tensor
        ) -> tf.Tensor:
            places = SlotIndex(slot_nk[tf.newaxis], source_1X)
            return weigh_slots(rows_1XM, gate_nk[tf.newaxis], places)[0]

        region = manual_region(
            weigh, [(devices, None, model), narrow, narrow, narrow], (devices, model)
        )
        y_NM = region(rows_DXM, _flat(routing.gate), slot_Nk, source_DX)
        return self.Shard(tf.reshape(y_NM, [groups, size, y_NM.shape[-1]]), "GSM")

    @classmethod
    def Flops(cls, G: int, S: int, E: int, C: int, M: int) -> int:
        """Moving rows multiplies nothing."""
        return 0

    @classmethod
    def ExpertRows(cls, G: int, S: int, E: int, C: int, k: int) -> int:
        """All choices, or as many as experts can choose."""
        return G * min(S * k, E * C)

    def _BufferRows(self, tokens: int, ranks: int, layout: "_Layout") -> int:
        most = layout.largest_buffer(tokens, ranks)
        factor = self.p.device_capacity_factor
        if not factor:
            return most
        return min(most, max(1, math.ceil(factor * tokens * ranks / layout.owners - 1e-9)))

    def _LayoutOf(self, routing: Routing) -> "_Layout":
        """The sharding of tokens and experts. Raises ShardingError where this dispatcher cannot follow it."""
        mesh = mesh_of(self.path, None)
        group, model = self.GroupAxes()
        experts = there(dims_mapping("E", self.p.activation_split or {})[0], mesh)
        devices = axes_of(group)
        parts = mesh.axis_size(experts or ())
        expert_axes = axes_of(experts)
        if parts > 1 and (not expert_axes or devices[-len(expert_axes) :] != expert_axes):
            raise ShardingError(
                f"{self.path}: the dropless dispatcher takes tokens from device to device along the axes of "
                f"the experts, {experts!r}, and these have to be the last of the axes of the tokens, "
                f"{group!r}; e.g. activation_split={{'G': ('data', 'expert'), 'E': 'expert'}}, or use "
                "dispatcher='einsum'"
            )
        tokens, num_devices = routing.gate.shape[:2].num_elements(), mesh.axis_size(group or ())
        if tokens is not None and tokens % num_devices:
            raise ShardingError(
                f"{self.path}: {tokens} tokens do not divide evenly over the {num_devices} devices of "
                f"axis {group!r}, {_OTHERWISE}"
            )
        if routing.num_experts % parts:
            raise ShardingError(
                f"{self.path}: {routing.num_experts} experts do not divide evenly over the {parts} "
                f"devices of axis {experts!r}, {_OTHERWISE}"
            )
        return _Layout(
            group,
            experts if parts > 1 else None,
            model,
            num_devices,
            parts,
            routing.num_experts // parts,
        )


@dataclass(frozen=True)
class _Layout:
    """The mesh axes over which tokens and experts are sharded."""

    devices: Axis  # the axes of the tokens
    experts: Axis  # the axes of the experts, the last of `devices`
    model: Axis  # the axes of M
    num_devices: int  # D, all devices, each of which has tokens of its own
    owners: (
        int  # Q, the devices over which the experts are sharded; 1: every device has all of them
    )
    local_experts: int  # e, the experts of a device

    def largest_buffer(self, tokens: int, ranks: int) -> int:
        """The most rows that one device can send another."""
        return tokens * min(ranks, self.local_experts)

    def Product(self, expected: int | None) -> Product:
        """The product of `Rows`; about `expected` rows of a device are filled, None: all. Only speed depends on it."""

        def product(
            rows_DNM: tf.Tensor, sizes_De: tf.Tensor, weights_EMH: tf.Tensor, mapping: DimsMapping
        ) -> tf.Tensor:
            taken, mesh = set(axes_of(self.devices)), mesh_of("product", None)
            inner, outer = (
                None if taken & set(axes_of(a)) else there(a, mesh) for a in mapping[1:]
            )

            def multiply(x: tf.Tensor, sizes: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
                matmul = kernels.current().grouped_matmul
                y = matmul(x[0], weights, sizes[0], expected)[tf.newaxis]
                return y if inner is None else all_reduce(y, inner)

            region = manual_region(
                multiply,
                [(self.devices, None, inner), (self.devices, None), (self.experts, inner, outer)],
                (self.devices, None, outer),
            )
            return region(rows_DNM, sizes_De, weights_EMH)

        return product

    def Exchange(self, x: tf.Tensor) -> tf.Tensor:
        """[D,Q,...], sharded along D, with sender and receiver swapped: one all-to-all.

        The partitioner derives it from a transposition between two annotations, as for slots.
        """
        mesh = mesh_of("Exchange", None)
        expert_axes = axes_of(self.experts)
        rest: Axis = axes_of(self.devices)[: -len(expert_axes)] or None
        shape = x.shape.as_list()
        tail: list[Axis] = [None] * (len(shape) - 2)
        if len(tail) == 2:  # rows
            tail[-1] = self.model
        mapping = (rest, self.experts, None, *tail)
        x = tf.reshape(x, [self.num_devices // self.owners, self.owners, *shape[1:]])
        x = mesh_split(x, mesh, mapping)
        x = mesh_split(tf.transpose(x, [0, 2, 1, *range(3, 1 + len(shape))]), mesh, mapping)
        return mesh_split(tf.reshape(x, shape), mesh, (self.devices, None, *tail))


def _for_devices(
    expert_nk: tf.Tensor, kept_nk: tf.Tensor, layout: _Layout, buffer: int
) -> tuple[SlotIndex, tf.Tensor]:
    """The places of choices in Q blocks of B rows, one for each device; those of a block by expert.

    Returns:
        SlotIndex with Q B slots, and int32 [Q,e], how many rows of each block belong to each expert.
    """
    places, sizes_E = sorted_places(expert_nk, kept_nk, layout.owners * layout.local_experts)
    sizes_Qe = tf.reshape(sizes_E, [layout.owners, layout.local_experts])
    count_Q = tf.reduce_sum(sizes_Qe, 1)
    start_Q = tf.cumsum(count_Q, exclusive=True)
    # The place of each sorted row in its block.
    part_nk = tf.where(kept_nk, expert_nk, 0) // layout.local_experts
    at_nk = places.slot_gSk[0] - tf.gather(start_Q, part_nk)
    fits_nk = tf.logical_and(kept_nk, at_nk < buffer)
    slot_nk = tf.where(fits_nk, part_nk * buffer + at_nk, -1)
    # The row at each place of a block.
    at_B = tf.range(buffer)[tf.newaxis]
    row_QB = tf.where(at_B < count_Q[:, tf.newaxis], start_Q[:, tf.newaxis] + at_B, -1)
    source_QB = tf.gather(places.source_gX[0], tf.maximum(row_QB, 0))
    source_QB = tf.where(row_QB < 0, -1, source_QB)
    ends_Qe = tf.minimum(tf.cumsum(sizes_Qe, 1), buffer)
    starts_Qe = tf.minimum(tf.cumsum(sizes_Qe, 1, exclusive=True), buffer)
    blocks = SlotIndex(slot_nk[tf.newaxis], tf.reshape(source_QB, [1, layout.owners * buffer]))
    return blocks, ends_Qe - starts_Qe


def _from_devices(sizes_Qe: tf.Tensor, buffer: int) -> tuple[SlotIndex, tf.Tensor]:
    """The places of received rows, Q blocks of B, sorted by expert; and int32 [e], their numbers."""
    parts, experts = sizes_Qe.shape
    ends_Qe = tf.cumsum(sizes_Qe, 1)
    before_QBe = ends_Qe[:, tf.newaxis] <= tf.range(buffer)[tf.newaxis, :, tf.newaxis]
    expert_QB = tf.reduce_sum(tf.cast(before_QBe, tf.int32), -1)
    expert_X1 = tf.reshape(expert_QB, [parts * buffer, 1])
    return sorted_places(expert_X1, expert_X1 < experts, experts)


def _numbers(routing: Routing) -> tf.Tensor:
    """int32 [G,S,k], the ids of the choices: see `Rows`."""
    groups, size, ranks = shape_of(routing.expert_index)
    # Derived from a run-time tensor: a constant of this size would be made while tracing.
    zero_GSk = routing.expert_index - routing.expert_index
    number_Sk = tf.range(size)[:, tf.newaxis] * ranks + tf.range(ranks)
    return zero_GSk + tf.range(groups)[:, tf.newaxis, tf.newaxis] * (size * ranks) + number_Sk


def _flat(x_GSM: tf.Tensor) -> tf.Tensor:
    """[G,S,M] as [N,M]."""
    return tf.reshape(x_GSM, [-1, x_GSM.shape[-1]])
