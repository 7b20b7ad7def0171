"""The loops of a pipelined step: all stages in lockstep, a tick an iteration.

What a stage gives to the next one is rolled by one along the stages: one collective-permute a tick and direction. A
stage keeps its input until its backward pass, which computes its blocks again.

Letters: K stages, V repeats, D micro-batches at the same time, one for each device along axis `data`, M such sets of
them, L blocks of a stack, n of a stage at a time, R ticks for which something is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from lingvo_moe.core.base_layer import name_scope
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.pipeline import schedule as schedules
from lingvo_moe.core.pipeline.schedule import Order, Phase, Schedule, Work
from lingvo_moe.core.pipeline.stage import Programs, floating
from lingvo_moe.core.pipeline.stage_layout import StageLayout
from lingvo_moe.core.tensors import runtime_zeros, sum_type, term_if


@dataclass(frozen=True)
class Unit:
    """The micro-batches and chunks that the stages work on in a tick, int32 or bool [K] each.

    Or scalars, of one stage.
    """

    number: tf.Tensor  # the number of the set of micro-batches, in 0..M-1
    chunk: tf.Tensor  # which of the stage's V parts
    valid: tf.Tensor  # false in the bubble


class Loops:
    """The loops of one step.

    `state` is NestedMap(stacks, rest, loss, metrics, outputs); a stack's has `arriving` and `upstream`, the carry and
    the gradients that each stage gets next, [K, D, ...]; `inputs` and, where gradients of weights come later,
    `gradients`, those that are kept, [K, R, D, ...]; and sums: `weights` and `extras` [K, D, V, n, ...], `of_rest` and
    `loss` [K, D, ...]. Other sums are [D, ...]. Gradients of weights outside of the stacks are named as in stage.py.
    """

    def __init__(
        self,
        schedule: Schedule,
        programs: Programs,
        layout: StageLayout,
        batch: NestedMap,
        like: tf.Tensor,
    ):
        self._float = like
        self._schedule, self._do, self._layout = schedule, programs, layout
        self._batch = layout.Sets(batch)
        self._parts = programs.parts
        self._K, self._V, self._M = schedule.stages, schedule.repeats, schedule.micro_batches
        self._stages = tf.range(self._K)

    def Run(self) -> NestedMap:
        """The state after all ticks."""
        state = self._Start()
        for phase in self._schedule.Phases():
            names = [f"{self._parts.stacks[w.stack].name}_{w.kind}" for w in phase.works]
            with name_scope(f"{self._do.path}.pipeline." + "__".join(names)):
                state = self._Loop(phase, state)
        return state

    def _Loop(self, phase: Phase, state: NestedMap) -> NestedMap:
        def step(tick: tf.Tensor, flat: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
            return tick + 1, self._Tick(phase, tick, state.Pack(list(flat))).Flatten()

        start = (tf.constant(phase.start), state.Flatten())
        _, flat = tf.while_loop(lambda tick, _: tick < phase.stop, step, start)
        return state.Pack(list(flat))

    def _Tick(self, phase: Phase, tick: tf.Tensor, before: NestedMap) -> NestedMap:
        state = before.Transform(lambda x: x)
        doing = {
            schedules.FORWARD: self._Forward,
            schedules.LOSS: self._Loss,
            schedules.BACKWARD: self._Backward,
            schedules.WEIGHTS: self._WeightGradients,
        }
        for work in phase.works:
            doing[work.kind](work, tick, before, state)
        return state

    # --- what is done in a tick; each changes `state`

    def _Forward(self, work: Work, tick: tf.Tensor, before: NestedMap, state: NestedMap) -> None:
        stack, mine = self._parts.stacks[work.stack], state.stacks[work.stack]
        unit = self._Unit(work, tick)
        number = self._Unit(work, tick, 0).number
        entering = self._do.Enter(work.stack, self._layout.Part(self._batch, number))
        entering = entering.Transform(lambda x: x[tf.newaxis])
        for name, source in stack.takes.items():
            entering[name] = before.stacks[work.stack - 1].arriving[source]
        enters = (self._stages == 0) & (unit.chunk == 0)
        carry = self._Chosen(work.stack, enters, entering, mine.arriving)
        slot = (tick - work.start) % self._schedule.InputsKept(work.stack)
        mine.inputs = self._layout.Written(work.stack, mine.inputs, slot, carry)
        done = self._do.Forward(work.stack, self._Given(work, unit, carry))
        mine.loss += done.loss
        mine.extras = map_structure(
            lambda total, x: total + self._InChunk(x, unit), mine.extras, done.extras
        )
        mine.arriving = self._layout.Rolled(work.stack, done.carry, 1)
        if work.stack == len(self._parts.stacks) - 1:
            # The last stage's, which the first one gets next.
            last = self._Last(mine.arriving)
            exits = work.start + self._K * self._V - 1
            slot = (tick - exits) % self._schedule.outputs_kept
            state.outputs = self._layout.WrittenOutputs(state.outputs, slot, last)

    def _Loss(self, work: Work, tick: tf.Tensor, before: NestedMap, state: NestedMap) -> None:
        unit = self._Unit(work, tick, 0)
        slot = (tick - work.start) % self._schedule.outputs_kept
        carry = state.outputs.Transform(lambda rows: tf.gather(rows, slot))
        part = self._layout.Part(self._batch, unit.number)
        results = self._do.Loss(NestedMap(part, carry=carry))
        state.loss += term_if(unit.valid, results.loss)
        state.metrics = map_structure(
            lambda total, x: total + term_if(unit.valid, x), state.metrics, results.metrics
        )
        self._AddToRest(state, results.rest, unit.valid)
        state.from_loss = results.carry

    def _Backward(self, work: Work, tick: tf.Tensor, before: NestedMap, state: NestedMap) -> None:
        mine, unit = state.stacks[work.stack], self._Unit(work, tick)
        upstream = mine.upstream
        if (above := self._FromAbove(work, before, state)) is not None:
            leaves = (self._stages == self._K - 1) & (unit.chunk == self._V - 1)
            upstream = self._Chosen(work.stack, leaves, above, upstream)
        forward = self._schedule.WorkOf(schedules.FORWARD, work.stack)
        since = work.start - forward.start + self._K - 1 - 2 * self._stages
        since += (self._V - 1 - 2 * unit.chunk) * self._K
        carry = self._layout.Read(work.stack, mine.inputs, tick - since - forward.start)
        args = self._Given(work, unit, carry, upstream)
        if self._schedule.splits_backward:
            done = self._do.Gradients(work.stack, args, weights=False)
            slot = (tick - work.start) % self._schedule.GradientsKept(work.stack)
            mine.gradients = self._layout.Written(work.stack, mine.gradients, slot, upstream)
        else:
            done = self._do.Gradients(work.stack, args)
            self._AddGradients(work.stack, mine, done, unit)
        first = self._Unit(work, tick, 0)
        entries = self._do.entries[work.stack]
        entered = NestedMap({name: done.carry[name][0] for name in entries if name in done.carry})
        part = self._layout.Part(self._batch, first.number)
        results = self._do.EnterGradients(work.stack, NestedMap(part, upstream=entered))
        self._AddToRest(state, results.rest, first.valid & (first.chunk == 0))
        mine.upstream = self._layout.Rolled(work.stack, done.carry, -1)

    def _FromAbove(self, work: Work, before: NestedMap, state: NestedMap) -> NestedMap | None:
        """The gradients that the last stage gets from the loss, or from the next stack; None if it gets none."""
        mine = state.stacks[work.stack].upstream
        zeros = mine.Transform(lambda x: self._Zeros(x.shape, x.dtype))
        if work.stack == len(self._parts.stacks) - 1:
            of_loss = state.pop("from_loss", None)
            if of_loss is None:
                return None
            rows = {name: _filled(x[tf.newaxis], zeros[name]) for name, x in of_loss.items()}
            return NestedMap(zeros, **rows)
        takes = self._parts.stacks[work.stack + 1].takes
        above = before.stacks[work.stack + 1].upstream
        return NestedMap(zeros, **{source: above[name] for name, source in takes.items()})

    def _WeightGradients(
        self, work: Work, tick: tf.Tensor, before: NestedMap, state: NestedMap
    ) -> None:
        mine, unit = state.stacks[work.stack], self._Unit(work, tick)
        number = tick - work.start
        carry = self._layout.Read(work.stack, mine.inputs, number + self._stages)
        upstream = self._layout.Read(
            work.stack, mine.gradients, number + self._K - 1 - self._stages
        )
        args = self._Given(work, unit, carry, upstream)
        results = self._do.Gradients(work.stack, args, carry=False)
        self._AddGradients(work.stack, mine, results, unit)

    # --- helpers

    def _Unit(self, work: Work, tick: tf.Tensor, stage: int | None = None) -> Unit:
        """The unit of work of all stages in a tick, or of one stage."""
        stages = self._stages if stage is None else tf.constant(stage)
        late = {
            Order.FROM_FIRST: stages,
            Order.FROM_LAST: self._K - 1 - stages,
            Order.TOGETHER: tf.zeros_like(stages),
        }[work.order]
        unit = tick - work.start - late
        valid = (unit >= 0) & (unit < self._V * self._M)
        number, chunk = unit, tf.zeros_like(unit)
        if self._V > 1:
            number = unit // (self._V * self._K) * self._K + unit % self._K
            chunk = unit // self._K % self._V
        if work.kind == schedules.LOSS:
            # The last stage's last part, counted from the first tick that has one.
            valid &= chunk == 0
        if work.kind == schedules.BACKWARD:
            chunk = self._V - 1 - chunk
        return Unit(tf.clip_by_value(number, 0, self._M - 1), chunk, valid)

    def _Given(
        self, work: Work, unit: Unit, carry: NestedMap, upstream: NestedMap | None = None
    ) -> NestedMap:
        """The arguments of the stages' work: see stage.py."""
        weights = self._layout.Weights(work.stack, unit.chunk)
        parts = NestedMap(self._layout.Part(self._batch, unit.number), carry=carry)
        if upstream is not None:
            parts.upstream = upstream
        return NestedMap(weights, valid=unit.valid, parts=parts)

    def _Chosen(
        self, stack: int, where: tf.Tensor, there: NestedMap, elsewhere: NestedMap
    ) -> NestedMap:
        def choose(name: str) -> tf.Tensor:
            rank = elsewhere[name].shape.rank
            mask = tf.reshape(where, [self._K] + [1] * (rank - 1))
            return tf.where(mask, there[name], elsewhere[name])

        return self._layout.OfStages(stack, NestedMap({name: choose(name) for name in elsewhere}))

    def _Last(self, arriving: NestedMap) -> NestedMap:
        """The part of the last stage's carry that the loss takes, which the first stage gets next."""
        cut = self._parts.cut
        taken = {name: arriving[name] for name in self._parts.takes}
        return NestedMap(
            {name: (x[..., : cut[name]] if name in cut else x)[0] for name, x in taken.items()}
        )

    def _InChunk(self, x: tf.Tensor, unit: Unit) -> tf.Tensor:
        """x [K, D, ...] as [K, D, V, ...], zeros except in each stage's chunk."""
        if self._V == 1:
            return x[:, :, tf.newaxis]
        here = tf.range(self._V) == unit.chunk[:, tf.newaxis]
        here = tf.reshape(here, [self._K, 1, self._V] + [1] * (x.shape.rank - 2))
        return tf.where(here, x[:, :, tf.newaxis], tf.zeros([], x.dtype))

    def _AddGradients(self, stack: int, mine: NestedMap, more: NestedMap, unit: Unit) -> None:
        sums = [
            total + self._InChunk(g, unit)
            for total, g in zip(mine.weights, more.weights, strict=True)
        ]
        mine.weights = self._layout.WeightSums(stack, self._do.trainable[stack], sums)
        mine.of_rest = map_structure(tf.add, mine.of_rest, more.rest)

    def _AddToRest(self, state: NestedMap, more: NestedMap, valid: tf.Tensor) -> None:
        for name, g in more.items():
            state.rest[name] = self._layout.OfRest(name, state.rest[name] + term_if(valid, g))

    # --- the state before the first tick

    def _Start(self) -> NestedMap:
        """Sums are zeros; so is what the stages get in the first tick, which is in the bubble for all but the first."""
        state = NestedMap(stacks=[], rest=NestedMap())
        part = self._layout.Part(self._batch, tf.constant(0))
        for j, stack in enumerate(self._parts.stacks):
            entering = self._do.Enter(j, part)
            carry = entering.Transform(lambda x: self._Zeros([self._K, *x.shape], x.dtype))
            for name, source in stack.takes.items():
                carry[name] = state.stacks[-1].arriving[source]
            mine = self._StackStart(j, self._layout.OfStages(j, carry))
            state.stacks.append(mine)
            results = self._do.EnterGradients(j, NestedMap(part, upstream=floating(entering)))
            self._RestStart(state, results)
        last = self._Last(mine.arriving)
        results = self._do.Loss(NestedMap(part, carry=last))
        self._RestStart(state, results)
        state.loss = self._Zeros(results.loss.shape, sum_type(results.loss.dtype))
        state.metrics = results.metrics.Transform(lambda x: self._Zeros(x.shape, sum_type(x.dtype)))
        rows = self._schedule.outputs_kept
        state.outputs = self._layout.Outputs(
            last.Transform(lambda x: self._Zeros([rows, *x.shape], x.dtype))
        )
        return state

    def _StackStart(self, j: int, carry: NestedMap) -> NestedMap:
        work = self._schedule.WorkOf(schedules.FORWARD, j)
        args = self._Given(work, self._Unit(work, tf.constant(0)), carry)
        done = self._do.Forward(j, args)
        args.parts.upstream = floating(carry)
        results = self._do.Gradients(j, args, carry=not self._schedule.splits_backward)
        room = self._layout.Room(j, self._schedule.InputsKept(j), carry, self._float)
        mine = NestedMap(
            arriving=carry,
            upstream=floating(carry),
            inputs=room,
            loss=self._Zeros(done.loss.shape, done.loss.dtype),
            extras=done.extras.Transform(lambda x: self._ChunkZeros(x)),
            weights=self._layout.WeightSums(
                j, self._do.trainable[j], [self._ChunkZeros(g) for g in results.weights]
            ),
            of_rest=results.rest.Transform(lambda g: self._Zeros(g.shape, g.dtype)),
        )
        if ticks := self._schedule.GradientsKept(j):
            mine.gradients = self._layout.Room(j, ticks, floating(carry), self._float)
        return mine

    def _RestStart(self, state: NestedMap, results: NestedMap) -> None:
        for name, g in results.rest.items():
            if name not in state.rest:
                state.rest[name] = self._layout.OfRest(
                    name, self._Zeros(g.shape, sum_type(g.dtype))
                )

    def _ChunkZeros(self, x: tf.Tensor) -> tf.Tensor:
        return self._Zeros([*x.shape[:2], self._V, *x.shape[2:]], x.dtype)

    def _Zeros(self, shape: Sequence[int], dtype: tf.DType = tf.float32) -> tf.Tensor:
        return runtime_zeros(self._float, dtype, list(shape))


def _filled(x: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """x, with zeros after it up to the last dimension of `like`."""
    missing = like.shape[-1] - x.shape[-1]
    return tf.pad(x, [*[[0, 0]] * (x.shape.rank - 1), [0, missing]]) if missing else x
