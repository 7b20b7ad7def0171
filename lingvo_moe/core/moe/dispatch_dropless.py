"""Dispatch and combine without capacity: rows sorted by expert, in groups of any size (Gale et al. 2022,
"MegaBlocks: Efficient Sparse Training with Mixture-of-Experts").

Nothing is dropped and no slot stays empty: experts compute a row for each kept choice. Over devices, each
device packs its rows by the device of their expert, an all-to-all sends them there, and the receiver sorts
them by expert; the way back is the same.

Letters: G group, S token in group, k choice rank, N tokens (n: those of one device), D devices, Q those
that share the experts, B rows from one device to another, R rows of a device, E expert, e experts of a
device, X places of rows, M model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.moe.dispatch import (
    Dispatcher,
    RunExperts,
    SlotIndex,
    blocks_to_send,
    of_slots,
    sorted_blocks,
    sorted_places,
    there,
    to_slots,
    weigh_slots,
)
from lingvo_moe.core.moe.experts import ROWS, Product, Rows
from lingvo_moe.core.moe.routers.base import Routing
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Axis, DimsMapping, ShardingError, dims_mapping
from lingvo_moe.core.sharding.annotate import mesh_of, mesh_split, replicate
from lingvo_moe.core.sharding.letters import axes_of
from lingvo_moe.core.sharding.manual import all_reduce, manual_region
from lingvo_moe.core.sharding.mesh import traced_slices
from lingvo_moe.core.tensors import open_shape, runtime_zeros, shape_of

_ONE_IN = 100  # times, at most, a round of the exchange has too little room; see `_Layout.room`
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
        x_NM, choices = _flat(x_GSM), _choices(routing)
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
        exchange_round: "_Round | None" = None,
    ) -> Rows:
        """Rows where experts are on other devices: packed by device, sent there, and sorted by expert.

        Of each device's rows for another, those of the round go; without one, as many first ones as there is room for.
        """
        devices, model, tokens = layout.devices, layout.model, x_NM.shape[0]
        ranks = choices_Nk[0].shape[1]
        assert tokens is not None  # checked by `_LayoutOf`
        buffer = self._BufferRows(tokens // layout.num_devices, ranks, layout)
        shape, offset = (layout.owners, layout.local_experts), tuple[tf.Tensor, ...]()
        if exchange_round is not None:
            buffer, offset = exchange_round.rows, (exchange_round.first,)

        def send(
            x_nM: tf.Tensor,
            expert_nk: tf.Tensor,
            kept_nk: tf.Tensor,
            number_nk: tf.Tensor,
            *first: tf.Tensor,
        ) -> tuple:
            places, sizes_Qe = blocks_to_send(expert_nk, kept_nk > 0, shape, buffer, *first)
            rows = to_slots(x_nM[tf.newaxis], places)
            rows = tf.reshape(rows, [1, layout.owners, buffer, x_nM.shape[1]])
            number_1X = of_slots(number_nk[tf.newaxis], places)
            number_1QB = tf.reshape(number_1X, [1, layout.owners, buffer])
            notes = (places.slot_gSk[0], places.source_gX)
            return rows, sizes_Qe[tf.newaxis], number_1QB, *notes

        def receive(rows_1QBM: tf.Tensor, sizes_1Qe: tf.Tensor, number_1QB: tf.Tensor) -> tuple:
            places, sizes_e = sorted_blocks(sizes_1Qe[0], buffer)
            rows = tf.reshape(rows_1QBM, [1, layout.owners * buffer, rows_1QBM.shape[-1]])
            number_1R = of_slots(tf.reshape(number_1QB, [1, layout.owners * buffer, 1]), places)
            notes = (places.slot_gSk[0], places.source_gX)
            return to_slots(rows, places), sizes_e[tf.newaxis], number_1R, *notes

        narrow = (devices, None, None)
        outs = [(devices, None, None, model), narrow, narrow, *[(devices, None)] * 2]
        ins = [(devices, model), *[(devices, None)] * 3, *[()] * len(offset)]
        sent_DQBM, sizes_DQe, number_DQB, *notes = manual_region(send, ins, outs)(
            x_NM, *choices_Nk, *offset
        )
        metrics = NestedMap()
        if exchange_round is None and buffer < layout.largest_buffer(
            tokens // layout.num_devices, ranks
        ):
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
        layout = self._LayoutOf(routing)
        slot_Nk, source_DX, *received = tokens.notes
        rows_DXM = self._Back(layout, tokens.values, received)
        return self._Weigh(layout, routing, rows_DXM, slot_Nk, source_DX)

    def _Weigh(
        self,
        layout: "_Layout",
        routing: Routing,
        rows_DXM: tf.Tensor,
        slot_Nk: tf.Tensor,
        source_DX: tf.Tensor,
    ) -> tf.Tensor:
        """The weighted sum of each token's rows, which are on its device, [G,S,M]; see `SlotIndex`."""
        groups, size, _ = shape_of(routing.gate)
        devices, model = layout.devices, layout.model
        narrow = (devices, None)

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

    def _Back(
        self, layout: "_Layout", rows_DXM: tf.Tensor, received: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Rows on the devices that they came from; `received` is what `_Send` notes of where they are now."""
        if received:
            devices, model = layout.devices, layout.model

            def send(rows_1RM: tf.Tensor, slot_X1: tf.Tensor, source_1R: tf.Tensor) -> tf.Tensor:
                places = SlotIndex(slot_X1[tf.newaxis], source_1R)
                one = tf.cast(slot_X1[tf.newaxis] >= 0, rows_1RM.dtype)
                rows = weigh_slots(rows_1RM, one, places)
                return tf.reshape(rows, [1, layout.owners, -1, rows_1RM.shape[-1]])

            wide = (devices, None, None, model)
            ins = [(devices, None, model), *[(devices, None)] * 2]
            back_DQBM = layout.Exchange(manual_region(send, ins, wide)(rows_DXM, *received))
            rows_DXM = tf.reshape(back_DQBM, [layout.num_devices, -1, back_DQBM.shape[-1]])
        return self.Keep(rows_DXM, "returned", ROWS)

    def Through(
        self, routing: Routing, x_GSM: tf.Tensor, experts: RunExperts, factor: float = 0.0
    ) -> tuple[tf.Tensor, NestedMap | None]:
        """See `Dispatcher`; with a factor in rounds, where that at least halves the buffers."""
        if factor and not traced_slices():
            layout, tokens = self._LayoutOf(routing), x_GSM.shape[:2].num_elements()
            if tokens is not None and layout.owners > 1:
                tokens, ranks = tokens // layout.num_devices, routing.kept.shape[-1]
                room = layout.room(tokens * ranks, factor)
                if 2 * room <= layout.largest_buffer(tokens, ranks):
                    return self._InRounds(layout, routing, x_GSM, experts, room), NestedMap()
        return super().Through(routing, x_GSM, experts)

    @scoped
    def _InRounds(
        self,
        layout: "_Layout",
        routing: Routing,
        x_GSM: tf.Tensor,
        experts: RunExperts,
        room: int,
    ) -> tf.Tensor:
        """Tokens through their experts by a loop of rounds, in each of which a device sends each other one `room` rows.

        All go on until none has a row left, nearly always after one round: buffers are small, and nothing is dropped.
        The rows of all choices that came back are kept [D,X,M] until the end, so that a token's sum does not depend on
        when they came.
        """
        x_NM, choices_Nk = _flat(x_GSM), _choices(routing)
        expected = choices_Nk[0].shape.num_elements() // layout.num_devices
        narrow, wide = (layout.devices, None), (layout.devices, None, layout.model)

        def begin(x_nM: tf.Tensor, expert_nk: tf.Tensor, kept_nk: tf.Tensor) -> tuple:
            sizes_E = sorted_places(expert_nk, kept_nk > 0, routing.num_experts)[1]
            sizes_1Q = tf.reduce_sum(tf.reshape(sizes_E, [1, layout.owners, -1]), 2)
            none_1XM = runtime_zeros(x_nM, x_nM.dtype, [1, expected, x_nM.shape[1]])
            return sizes_1Q, none_1XM

        ins = [(layout.devices, layout.model), narrow, narrow]
        sizes_DQ, none_DXM = manual_region(begin, ins, [narrow, wide])(x_NM, *choices_Nk[:2])
        most = replicate(tf.reduce_max(sizes_DQ))

        def take(rows_1RM: tf.Tensor, slot_nk: tf.Tensor, former_1XM: tf.Tensor) -> tf.Tensor:
            slot_1X = tf.reshape(slot_nk, [1, expected])
            rows_1XM = tf.gather(rows_1RM, tf.maximum(slot_1X, 0), batch_dims=1)
            rows_1XM = tf.cast(rows_1XM, former_1XM.dtype)
            return tf.where(slot_1X[..., tf.newaxis] >= 0, rows_1XM, former_1XM)

        def turn(first: tf.Tensor, rows_DXM: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            sent = self._Send(layout, x_NM, choices_Nk, expected, _Round(first, room))
            slot_Nk, _, *received = sent.notes
            new_DRM = self._Back(layout, experts(sent).values, received)
            region = manual_region(take, [wide, narrow, wide], wide)
            return first + room, region(new_DRM, slot_Nk, rows_DXM)

        with tf.name_scope("about_1_trips"):
            _, rows_DXM = tf.while_loop(
                lambda first, _: first < most, turn, (tf.constant(0), none_DXM)
            )
        at = tf.range(choices_Nk[0].shape.num_elements()) % expected
        places = (tf.reshape(at, shape) for shape in (choices_Nk[0].shape, [-1, expected]))
        return self._Weigh(layout, routing, rows_DXM, *places)

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
class _Round:
    """Some of the rows that a device has for another, which are ordered by expert, token and rank."""

    first: tf.Tensor  # int32 scalar
    rows: int


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

    def room(self, choices: int, factor: float) -> int:
        """Rows from one device to another that suffice for nearly all times, of so many choices of a device.

        It is exceeded by some pair of devices in one of a hundred times at most if experts are chosen at random, and
        those of every device `factor` times as often as the mean (the Chernoff bound of a Poisson distribution).
        """
        mean = factor * choices / self.owners
        rare = math.log(_ONE_IN * self.num_devices * self.owners)
        rows = max(1, math.floor(mean))
        while (more := rows + 1) * math.log(more / mean) - more + mean < rare:
            rows += 1
        return rows

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
                # Not x[0], whose gradient by TensorFlow's kernels is a copy among zeros.
                rows = tf.reshape(x, open_shape(x)[1:])
                y = tf.expand_dims(matmul(rows, weights, sizes[0], expected), 0)
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


def _choices(routing: Routing) -> tuple[tf.Tensor, ...]:
    """[N,k] each, a row for each token: its experts, which of them are kept, and the ids of its choices."""
    return tuple(_flat(x) for x in (routing.expert_index, routing.kept, _numbers(routing)))


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
