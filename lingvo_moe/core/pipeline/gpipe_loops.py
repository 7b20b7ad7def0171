"""The two loops of a GPipe pipeline, forward and backward, over packed tensors.

Letters: as in gpipe.py.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.nested_map import NestedMap, flatten, pack_as
from lingvo_moe.core.pipeline.cell_program import EXTRAS, CellProgram, Vectors
from lingvo_moe.core.pipeline.stage_vectors import largest
from lingvo_moe.core.pipeline.ticks import ROWS, STAGE, Stages, StageWork
from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.tensors import sum_type

# What unused parts of the buffers hold. No number of theirs may reach a result: tests set it to NaN.
_UNUSED = 0.0


class GPipeLoops:
    """The two loops over ticks, for one batch."""

    def __init__(
        self,
        scope: Callable[[str], contextlib.AbstractContextManager],
        specs: NestedMap,
        programs: Sequence[CellProgram],
        stages: Stages,
        num: int,
        differentiate_inputs: bool,
    ):
        self._scope, self._specs, self._programs = scope, specs, list(programs)
        self._stages, self._num = stages, num
        self._ticks = num + len(programs) - 1
        self._differentiate_inputs = differentiate_inputs
        self._between = largest([program.inputs for program in programs[1:]])
        self._after = largest([programs[-1].outputs])

    def Run(
        self, theta: NestedMap, given: Vectors, seed: tf.Tensor | None
    ) -> tuple[Vectors, Vectors]:
        """The packed outputs [M, D, A] by dtype, and sums over micro-batches [K, D, ...] of updates and extras."""
        structure = (dict(theta), given, [] if seed is None else [seed])
        results: Any = None

        @private.custom_gradient
        def run(*flat: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
            nonlocal results
            weights, given, seeds = pack_as(structure, list(flat))
            final, sums, kept = self._Forward(weights, given, seeds)
            results = (final, sums)

            def grad(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
                dfinal, dsums = pack_as(results, list(upstream))
                with self._scope("backward"):
                    dweights, dgiven = self._Backward(weights, given, seeds, kept, dfinal, dsums)
                found = [dweights.get(name) for name in sorted(weights)]
                found += [dgiven.get(name) for name in sorted(given)]
                return found + [None for _ in seeds]

            return flatten(results), grad

        found = run(*flatten(structure))
        return pack_as(results, flatten(found))

    def _Forward(
        self, weights: Vectors, given: Vectors, seeds: list[tf.Tensor]
    ) -> tuple[Vectors, Vectors, Vectors]:
        """Outputs and sums as Run returns them, and the inputs of all stages in all ticks, [T, K, D, A] by dtype."""
        scalar = _runtime_zero(weights)
        state = {name: self._Buffer(scalar, name, n) for name, n in self._between.items()}

        def tick(t: tf.Tensor, state: Vectors, sums: Vectors, kept: Any, finals: Any) -> tuple:
            kept = {name: array.write(t, state[name]) for name, array in kept.items()}
            own = {"weights": weights, "state": state, "sums": sums}
            shared = {"t": t, "given": self._At(given, t), "seeds": seeds}
            state, (final, sums) = self._stages.Tick(t, work, own, shared)
            finals = {name: array.write(t, final[name]) for name, array in finals.items()}
            return t + 1, state, sums, kept, finals

        work = StageWork(self._num, self._ForwardStage, self._Idle, by=1)
        start = (
            tf.constant(0),
            state,
            self._ZeroSums(scalar),
            self._Arrays(self._between),
            self._Arrays(self._after),
        )
        loop = tf.while_loop(lambda t, *_: t < self._ticks, tick, start)
        _, _, sums, kept, finals = loop
        last = len(self._programs) - 1
        outputs = {
            name: self._OfStage(last, array.stack()[last:]) for name, array in finals.items()
        }
        mapping = (None, STAGE, ROWS, None)
        stacks = {name: self._stages.Sharded(a.stack(), mapping) for name, a in kept.items()}
        return outputs, sums, stacks

    def _ForwardStage(
        self, k: int, block: tf.Tensor, own: Any, shared: Any
    ) -> tuple[Vectors, tuple[Vectors, Vectors]]:
        program = self._programs[k]
        given = own["state"] if k else shared["given"]
        seed = self._Seed(k, block, shared)
        outs, sums = program.Forward(own["weights"], given, seed, own["sums"])
        final = self._Unused(self._after, shared["t"])
        if program is self._programs[-1]:
            return own["state"], (program.outputs.Pack(outs, final), sums)
        return program.outputs.Pack(outs, own["state"]), (final, sums)

    def _Idle(self, own: Any, shared: Any) -> tuple[Vectors, tuple[Vectors, Vectors]]:
        return own["state"], (self._Unused(self._after, shared["t"]), own["sums"])

    def _Backward(
        self,
        weights: Vectors,
        given: Vectors,
        seeds: list[tf.Tensor],
        kept: Vectors,
        dfinal: Vectors,
        dsums: Vectors,
    ) -> tuple[Vectors, Vectors]:
        """The gradients of the packed variables that are trained, and of the packed inputs."""
        scalar = _runtime_zero(weights)
        dfinal = {name: x for name, x in dfinal.items() if x.dtype.is_floating}
        dextras = {EXTRAS: dsums[EXTRAS]} if EXTRAS in dsums else {}
        dstate = {
            name: self._Buffer(scalar, name, n)
            for name, n in self._between.items()
            if tf.as_dtype(name).is_floating
        }
        lengths = self._programs[0].inputs.Lengths(floating=True)
        lengths = lengths if self._differentiate_inputs else {}

        def tick(t: tf.Tensor, dstate: Vectors, dweights: Vectors, arrays: Any) -> tuple:
            own = {"weights": weights, "state": self._At(kept, t), "upstream": dstate}
            own |= {"dextras": dextras}
            first = t - (len(self._programs) - 1)
            shared = {"t": t, "given": self._At(given, t), "seeds": seeds}
            shared |= {"upstream": self._At(dfinal, first)}
            # Sums stay out of the conditional, which would copy them.
            dstate, (dgiven, rows) = self._stages.Tick(t, work, own, shared)
            dweights = {name: x + rows[name] for name, x in dweights.items()}
            arrays = {name: array.write(t, dgiven[name]) for name, array in arrays.items()}
            return t - 1, dstate, dweights, arrays

        def backward(k: int, block: tf.Tensor, own: Any, shared: Any) -> tuple:
            return self._BackwardStage(k, block, own, shared, lengths)

        def idle(own: Any, shared: Any) -> tuple:
            return own["upstream"], (
                self._Unused(lengths, shared["t"]),
                self._ZeroRows(shared["t"]),
            )

        work = StageWork(self._num, backward, idle, by=-1)
        start = (
            tf.constant(self._ticks - 1),
            dstate,
            self._ZeroGradients(scalar),
            self._Arrays(lengths),
        )
        loop = tf.while_loop(lambda t, *_: t >= 0, tick, start)
        _, _, dweights, arrays = loop
        # The only sum over the devices that rows are spread over.
        summed = {name: tf.reduce_sum(x, 1) for name, x in dweights.items()}
        sharded = {
            name: tf.cast(self._stages.Sharded(x, (STAGE, None)), weights[name].dtype)
            for name, x in summed.items()
        }
        num = self._num
        return sharded, {name: self._OfStage(0, a.stack()[:num]) for name, a in arrays.items()}

    def _BackwardStage(
        self, k: int, block: tf.Tensor, own: Any, shared: Any, lengths: dict[str, int]
    ) -> tuple[Vectors, tuple[Vectors, Vectors]]:
        program = self._programs[k]
        is_last = program is self._programs[-1]
        dargs, rows = program.Backward(
            own["weights"],
            own["state"] if k else shared["given"],
            self._Seed(k, block, shared),
            shared["upstream"] if is_last else own["upstream"],
            own["dextras"].get(EXTRAS),
        )
        rows = self._ZeroRows(shared["t"]) | rows
        unused = self._Unused(lengths, shared["t"])
        if k == 0:
            return own["upstream"], (program.inputs.Pack(dargs, unused), rows)
        return program.inputs.Pack(dargs, own["upstream"]), (unused, rows)

    def _Seed(self, k: int, block: tf.Tensor, shared: Any) -> tf.Tensor | None:
        """The seed of stage k's micro-batch and of the device's rows."""
        if not shared["seeds"]:
            return None
        seed = randomness.fold_in(shared["seeds"][0], shared["t"] - k)
        return randomness.fold_in(seed, block) if self._stages.sum_blocks > 1 else seed

    def _At(self, stacks: Vectors, i: tf.Tensor) -> Vectors:
        """Element i of stacks, or the nearest that there is."""
        found = {}
        for name, x in stacks.items():
            part = tf.gather(x, tf.clip_by_value(i, 0, x.shape[0] - 1))
            mapping = (STAGE, ROWS, None) if part.shape.rank == 3 else (ROWS, None)
            found[name] = self._stages.Sharded(part, mapping)
        return found

    def _OfStage(self, k: int, stack: tf.Tensor) -> tf.Tensor:
        """Takes stage k's part [.., D, A] of a stack [.., K, D, A]. Other stages' parts may hold anything."""
        is_own = tf.reshape(tf.equal(tf.range(self._stages.count), k), [1, -1, 1, 1])
        own = tf.where(is_own, stack, tf.zeros([], stack.dtype))
        total = tf.reduce_any(own, 1) if stack.dtype == tf.bool else tf.reduce_sum(own, 1)
        return self._stages.Sharded(total, (None, ROWS, None))

    def _Buffer(self, scalar: tf.Tensor, dtype: str, length: int) -> tf.Tensor:
        """A buffer [K, D, length] that holds nothing yet."""
        shape = [self._stages.count, self._stages.devices, length]
        return self._stages.Sharded(_filled(scalar, dtype, shape), (STAGE, ROWS, None))

    def _Unused(self, lengths: dict[str, int], t: tf.Tensor) -> Vectors:
        """Vectors [D, length] of a stage that has nothing to put there."""
        blocks = self._programs[0].inputs.blocks
        return {name: _filled(tf.minimum(t, 0), name, [blocks, n]) for name, n in lengths.items()}

    def _ZeroSums(self, scalar: tf.Tensor) -> Vectors:
        """Zeros to add up in: [K, D, P] for each packed variable that has updates, and [K, D, X] for the extras."""
        updated = {path for program in self._programs for path in program.updated}
        found = {}
        for name, spec in self._specs.items():
            if any(part.path in updated for row in spec.packs for part in row):
                found[name] = self._Zeros(scalar, tf.as_dtype(spec.dtype), spec.shape[1])
        extras = [program.extras.Flatten() for program in self._programs]
        length = max(sum(x.shape.num_elements() for x in cell) for cell in extras)
        if length:
            is_wide = any(x.dtype == tf.float64 for cell in extras for x in cell)
            dtype = tf.float64 if is_wide else tf.float32
            found[EXTRAS] = self._Zeros(scalar, dtype, length)
        return found

    def _ZeroGradients(self, scalar: tf.Tensor) -> Vectors:
        """[K, D, P] for each packed variable that is trained."""
        return {
            name: self._Zeros(scalar, tf.as_dtype(spec.dtype), spec.shape[1])
            for name, spec in self._specs.items()
            if spec.trainable
        }

    def _ZeroRows(self, t: tf.Tensor) -> Vectors:
        """[1, P] for each packed variable that is trained: what a stage adds that has no micro-batch."""
        return {
            name: tf.fill(
                [1, spec.shape[1]], tf.cast(tf.minimum(t, 0), sum_type(tf.as_dtype(spec.dtype)))
            )
            for name, spec in self._specs.items()
            if spec.trainable
        }

    def _Zeros(self, scalar: tf.Tensor, dtype: tf.DType, length: int) -> tf.Tensor:
        shape = [self._stages.count, self._stages.sum_blocks, length]
        zeros = tf.fill(shape, tf.cast(scalar, sum_type(dtype)))
        mapping = (STAGE, ROWS if self._stages.sum_blocks > 1 else None, None)
        return self._stages.Sharded(zeros, mapping)

    def _Arrays(self, lengths: dict[str, int]) -> dict[str, tf.TensorArray]:
        """Makes, for each dtype, an array over ticks of [K, D, length]."""
        shape = [self._stages.count, self._stages.devices]
        return {
            name: tf.TensorArray(
                tf.as_dtype(name),
                self._ticks,
                element_shape=[*shape, n],
                clear_after_read=False,
            )
            for name, n in lengths.items()
        }


def _filled(scalar: tf.Tensor, dtype: str, shape: Sequence[int]) -> tf.Tensor:
    """A tensor for unused parts; `scalar` is a zero that is no constant."""
    value = tf.cast(scalar, tf.as_dtype(dtype))
    if value.dtype.is_floating:
        value += tf.cast(_UNUSED, value.dtype)
    return tf.fill(shape, value)


def _runtime_zero(weights: Vectors) -> tf.Tensor:
    """A float32 zero that tracing cannot fold: constants of the size of buffers would be part of the program."""
    first = tf.reduce_sum(tf.cast(next(iter(weights.values()))[:, :1], tf.float32))
    return tf.cast(tf.math.is_nan(first) & tf.math.is_inf(first), tf.float32)
