"""The sharding of a pipeline's tensors: the dimension of stages along the axis `stage`, the others as without it.

Letters: K stages, V repeats, P = K V parts of a stack, n blocks of the largest part, L blocks in all, R ticks for which
something is kept, D micro-batches at the same time, one for each device along axis `data`, M such sets of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.pipeline.blocks import StageBlocks
from lingvo_moe.core.pipeline.schedule import DATA, STAGE, Schedule
from lingvo_moe.core.sharding import DimsMapping, dims_mapping
from lingvo_moe.core.sharding.annotate import mesh_of, sharded
from lingvo_moe.core.sharding.letters import SplitMap, axes_of
from lingvo_moe.core.sharding.manual import manual_region
from lingvo_moe.core.tensors import runtime_zeros, with_row


@dataclass(frozen=True)
class StackTensors:
    """The tensors of a stack of L blocks."""

    carry: Mapping[str, DimsMapping]  # the mesh axes of what passes from stage to stage, by name
    weights: NestedMap  # [L, ...]
    # For each weight the mesh axes of its dimensions. If the parts have different sizes, axis `stage` may shard another
    # dimension than L, and weights and gradients are exchanged once in a step.
    splits: Sequence[DimsMapping]


class StageLayout:
    """Annotates the tensors of a pipeline, and lays them out by stage."""

    def __init__(
        self,
        schedule: Schedule,
        specs: NestedMap,
        stacks: Sequence[StackTensors],
        rest_splits: Mapping[str, DimsMapping],
        ends: tuple[int, ...] = (),
        devices: int = 1,
    ):
        """
        Args:
            specs: the ArraySpecs of the batch, whose `split` has no axis `data`.
            rest_splits: the mesh axes of the other weights, by the names of their gradients (see stage.py).
            ends: StageBlocks.ends of each stack.
            devices: D, of which each works on rows of its own: on a micro-batch, or on a part of the rows of one.
        """
        self._K, self._V, self._M = schedule.stages, schedule.repeats, schedule.micro_batches
        self._specs = specs
        self._mesh = mesh_of("the layout of a pipeline", None)
        self.D = devices
        self._data = DATA if self.D > 1 else None
        self._carries = [
            {name: (self._data, *without_data(split)) for name, split in stack.carry.items()}
            for stack in stacks
        ]
        self._outside, self._rest = [stack.splits for stack in stacks], rest_splits
        self._splits = [[without(STAGE, s[1:]) for s in splits] for splits in self._outside]
        self._blocks, self._weights = list[StageBlocks](), list[NestedMap]()
        for j, stack in enumerate(stacks):
            leaves = stack.weights.Flatten()
            num = leaves[0].shape[0]
            self._blocks.append(StageBlocks(num, schedule.stages, schedule.repeats, ends))
            items = zip(leaves, stack.splits, strict=True)
            self._weights.append(stack.weights.Pack([self._ByStage(j, x, s) for x, s in items]))

    # --- weights

    def _ByStage(self, stack: int, w: tf.Tensor, split: DimsMapping) -> tf.Tensor:
        """[L, ...] as [K, V, n, ...]: blocks in order pass stages 0..K-1, V times."""
        blocks = self._blocks[stack]
        if not blocks.equal:
            w = padded(w, blocks)
        x = tf.reshape(w, [self._V, self._K, blocks.largest, *w.shape[1:]])
        x = tf.transpose(x, [1, 0, *range(2, x.shape.rank)])
        if not blocks.equal:
            x = sharded(x, (None, None, None, *split[1:]))
        return sharded(x, (STAGE, None, None, *without(STAGE, split[1:])))

    def InOrder(self, stack: int, x: tf.Tensor, split: DimsMapping = ()) -> tf.Tensor:
        """Sums [K, D, V, n, ...] as [L, ...]: the sum over D, without padding.

        Args:
            split: the mesh axes of the result; empty: XLA decides.
        """
        x, blocks = tf.reduce_sum(x, 1), self._blocks[stack]
        if split and not blocks.equal:
            x = sharded(x, (None, None, None, *split[1:]))
        flat = tf.transpose(x, [1, 0, *range(2, x.shape.rank)])
        flat = tf.reshape(flat, [-1, *x.shape[3:]])
        return sharded(flat if blocks.equal else unpadded(flat, blocks), split)

    def WeightsInOrder(
        self, stack: int, trainable: Sequence[bool], sums: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Sums of gradients [K, D, V, n, ...] as [L, ...], sharded like the weights."""
        splits = [s for s, t in zip(self._outside[stack], trainable, strict=True) if t]
        return [self.InOrder(stack, x, split) for x, split in zip(sums, splits, strict=True)]

    def Weights(self, stack: int, chunk: tf.Tensor) -> NestedMap:
        """NestedMap(weights, first, count) of each stage's blocks in chunk[stage]: their weights [K, n, ...]; the
        numbers of the first ones, int32 [K]; and how many there are, int32 [K], absent if all stages have n."""
        weights, blocks = self._weights[stack], self._blocks[stack]
        part = chunk * self._K + tf.range(self._K)
        if blocks.equal:
            numbers = NestedMap(first=part * blocks.largest)
        else:
            numbers = NestedMap(
                first=tf.gather(blocks.firsts, part), count=tf.gather(blocks.counts, part)
            )
        if self._V == 1:
            chosen = [w[:, 0] for w in weights.Flatten()]
        else:
            chosen = [tf.gather(w, chunk, batch_dims=1) for w in weights.Flatten()]
        splits = self._splits[stack]
        annotated = [sharded(w, (STAGE, None, *s)) for w, s in zip(chosen, splits, strict=True)]
        return NestedMap(numbers, weights=weights.Pack(annotated))

    def WeightSums(
        self, stack: int, trainable: Sequence[bool], sums: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Annotates sums of gradients [K, D, V, n, ...], of the weights that are trainable."""
        splits = [s for s, t in zip(self._splits[stack], trainable, strict=True) if t]
        return [
            sharded(x, (STAGE, self._data, None, None, *self._Kept(split)))
            for x, split in zip(sums, splits, strict=True)
        ]

    def OfRest(self, path: str, x: tf.Tensor) -> tf.Tensor:
        """Annotates a sum of gradients [D, ...] of a weight outside of the stacks."""
        return sharded(x, (self._data, *self._Kept(self._rest[path])))

    def _Kept(self, split: DimsMapping) -> DimsMapping:
        """The mesh axes of a weight's sum that has a dimension D, which takes axis `data`."""
        return without_data(split) if self._data else split

    # --- what passes from stage to stage

    def OfStages(self, stack: int, carry: NestedMap) -> NestedMap:
        """Annotates a carry [K, ...] of all stages."""
        splits = self._carries[stack]
        return NestedMap({n: sharded(x, (STAGE, *splits[n])) for n, x in carry.items()})

    def Rolled(self, stack: int, carry: NestedMap, by: int) -> NestedMap:
        """Each stage's carry moved to the next stage (by=1) or to the one before it (by=-1), in a circle."""

        def roll(x: tf.Tensor) -> tf.Tensor:
            parts = [x[-1:], x[:-1]] if by == 1 else [x[1:], x[:1]]
            return tf.concat(parts, 0)

        return self.OfStages(stack, self.OfStages(stack, carry).Transform(roll))

    def Room(self, stack: int, ticks: int, carry: NestedMap, like: tf.Tensor) -> NestedMap:
        """Room for the carries [K, ...] of so many ticks: zeros [K, R, ...]."""

        def room(x: tf.Tensor) -> tf.Tensor:
            return runtime_zeros(like, x.dtype, [x.shape[0], ticks, *x.shape[1:]])

        return self._Rows(stack, carry.Transform(room))

    def Written(self, stack: int, rows: NestedMap, slot: tf.Tensor, carry: NestedMap) -> NestedMap:
        """The rows [K, R, ...] with the carry of all stages in one slot."""

        def write(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return with_row(x, slot, y, 1)

        return self._Rows(stack, map_structure(write, rows, carry))

    def Read(self, stack: int, rows: NestedMap, ticks: tf.Tensor) -> NestedMap:
        """Reads for each stage the row of the tick in ticks[stage]: [K, ...]."""

        def read(x_KR: tf.Tensor, slot_K: tf.Tensor) -> tf.Tensor:
            return tf.gather(x_KR, slot_K, batch_dims=1)

        at_ticks = NestedMap()
        for name, x in rows.items():
            # Each stage reads its own rows: the partitioner would not know it.
            split = self._carries[stack][name]
            ins = [(STAGE, None, *split), (STAGE,)]
            slots = tf.math.floormod(ticks, x.shape[1])
            fn = read if self._mesh.size == 1 else manual_region(read, ins, (STAGE, *split))
            at_ticks[name] = fn(x, slots)
        return at_ticks

    def WrittenOutputs(self, rows: NestedMap, slot: tf.Tensor, last: NestedMap) -> NestedMap:
        """The rows [R, ...] of the last stage's outputs, which all stages share, with one more of them."""
        written = map_structure(lambda x, y: with_row(x, slot, y), rows, last)
        return self.Outputs(written)

    def Outputs(self, rows: NestedMap) -> NestedMap:
        """Annotates rows [R, ...] of outputs: each stage keeps a part of each micro-batch, if it divides."""
        mesh = self._mesh

        def outputs(x: tf.Tensor, split: DimsMapping) -> tf.Tensor:
            data, by_rows, *rest = split
            axes = (*axes_of(by_rows), STAGE)
            if mesh.size == 1 or x.shape[0] == 1 or x.shape[2] % mesh.axis_size(axes):
                axes = axes[:-1]
            return sharded(x, (None, data, axes or None, *rest))

        return NestedMap({n: outputs(x, self._carries[-1][n]) for n, x in rows.items()})

    def _Rows(self, stack: int, rows: NestedMap) -> NestedMap:
        splits = self._carries[stack]
        return NestedMap({n: sharded(x, (STAGE, None, *splits[n])) for n, x in rows.items()})

    # --- the batch

    def Sets(self, batch: NestedMap) -> NestedMap:
        """The micro-batches of Division.Stacked, [M D, rows, ...] or [M, D rows, ...], as M sets: [M, D, rows, ...]."""

        def sets(x: tf.Tensor, spec: ArraySpec) -> tf.Tensor:
            if not spec.has_rows:
                return x
            shaped = tf.reshape(x, [self._M, self.D, -1, *x.shape[2:]])
            return sharded(shaped, (None, self._data, *spec.split))

        return map_structure(sets, batch, self._specs)

    def Part(self, batch: NestedMap, number: tf.Tensor) -> NestedMap:
        """NestedMap(batch, number) of the micro-batches of sets.

        Args:
            batch: as `Sets` gives it.
            number: of a set, for results [D, ...]; or [K], of the set of each stage, for [K, D, ...].
        """
        leading = (STAGE,) * number.shape.rank

        def taken(x: tf.Tensor, spec: ArraySpec) -> tf.Tensor:
            if not spec.has_rows:
                return tf.broadcast_to(x, [*number.shape, self.D, *x.shape])
            split = (*leading, self._data, *spec.split)
            return sharded(tf.gather(x, number), split)

        of_batch = map_structure(taken, batch, self._specs)
        numbers = number[..., tf.newaxis] * self.D + tf.range(self.D)
        return NestedMap(batch=of_batch, number=sharded(numbers, (*leading, self._data)))


def padded(w: tf.Tensor, blocks: StageBlocks) -> tf.Tensor:
    """[L, ...] as [P n, ...]: a smaller part has its last block several times."""
    if blocks.ends:
        parts = [w[first:end] for first, end in zip(blocks.firsts, blocks.ends, strict=True)]
        lacking = [blocks.largest - part.shape[0] for part in parts]
        filled = [tf.concat([x, *[x[-1:]] * n], 0) for x, n in zip(parts, lacking, strict=True)]
        return tf.concat(filled, 0)
    n, equal = blocks.largest, blocks.num_largest * blocks.largest
    short = tf.reshape(w[equal:], [-1, n - 1, *w.shape[1:]])
    short = tf.concat([short, short[:, -1:]], 1)
    return tf.concat([w[:equal], tf.reshape(short, [-1, *w.shape[1:]])], 0)


def unpadded(x: tf.Tensor, blocks: StageBlocks) -> tf.Tensor:
    """[P n, ...] as [L, ...], without padding."""
    if blocks.ends:
        starts = range(0, x.shape[0], blocks.largest)
        counts = zip(starts, blocks.counts.tolist(), strict=True)
        return tf.concat([x[start : start + count] for start, count in counts], 0)
    n, equal = blocks.largest, blocks.num_largest * blocks.largest
    short = tf.reshape(x[equal:], [-1, n, *x.shape[1:]])[:, :-1]
    return tf.concat([x[:equal], tf.reshape(short, [-1, *x.shape[1:]])], 0)


def dims_of(carry: Mapping[str, str], split: SplitMap) -> dict[str, DimsMapping]:
    """The mesh axes of tensors, by name, from their letters."""
    return {name: dims_mapping(letters, split) for name, letters in carry.items()}


def without_data(split: DimsMapping) -> DimsMapping:
    """The mesh axes of one micro-batch of several along `data`."""
    return without(DATA, split)


def without(axis: str, split: DimsMapping) -> DimsMapping:
    """The mesh axes of a tensor's dimensions but one."""
    rest = [tuple(a for a in axes_of(axes) if a != axis) for axes in split]
    return tuple(axes or None for axes in rest)
