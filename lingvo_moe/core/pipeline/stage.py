"""What is computed in a tick: the work of all stages at once, and what is done for one micro-batch before the first
stage and after the last.

The work of stages is a function of one stage, vectorized over them (core/sharding/vectorized.py). In the bubble a stage
computes on rubbish; what it would add to a sum is selected away, never multiplied by zero, so that NaN there changes
nothing.

Letters: K stages, n blocks of a stage at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context, Parts
from lingvo_moe.core.pipeline.schedule import STAGE
from lingvo_moe.core.sharding.vectorized import vectorized
from lingvo_moe.core.tensors import runtime_zeros


class Traced:
    """A function of a NestedMap of tensors that returns one, traced at its first call for all loops that call it."""

    def __init__(self, fn: Callable[[NestedMap], NestedMap]):
        self._fn = fn
        self._concrete: Any = None
        self._structure = NestedMap()

    def __call__(self, given: NestedMap) -> NestedMap:
        specs = given.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
        return self.Results(specs).Pack(list(self._Concrete(specs)(*given.Flatten())))

    def Results(self, specs: NestedMap) -> NestedMap:
        """TensorSpecs of the results, given those of the arguments."""
        outputs = self._Concrete(specs).outputs
        return self._structure.Pack([tf.TensorSpec(x.shape, x.dtype) for x in outputs])

    def _Concrete(self, specs: NestedMap) -> Any:
        if self._concrete is None:

            def run(*flat: tf.Tensor) -> list[tf.Tensor]:
                self._structure = self._fn(specs.Pack(list(flat)))
                return self._structure.Flatten()

            traced = tf.function(run, autograph=False)
            self._concrete = traced.get_concrete_function(*specs.Flatten())
        return self._concrete


class Programs:
    """The programs of a task's parts.

    `given`, of all stages' work, is a NestedMap of tensors [K, ...]: weights, [K, n, ...]; first, int32, the number of
    the first block; valid, bool, false in the bubble; carry; batch, the stage's micro-batch; number, int32, of that;
    and for gradients `upstream`, those of the carry afterwards.

    Gradients of weights outside of the stacks are a NestedMap `rest`, of those that have any: 'g3' is that of the
    fourth leaf of shared.rest.

    Attributes:
        path: of the task.
        parts: of the task, with the sizes of a micro-batch.
        trainable: for each stack, which of its weights get gradients.
        entries: for each stack the names of what `Enter` gives it.
    """

    def __init__(
        self,
        path: str,
        units: Callable[[NestedMap], NestedMap],
        parts: Parts,
        trainable: Sequence[Sequence[bool]],
        shared: NestedMap,
    ):
        """
        Args:
            path, parts, trainable: see the class.
            units: BaseTask.Units of a micro-batch.
            shared: NestedMap(rest, seed, units), what is the same for all: the weights outside of the stacks, the
                step's seed, and Units of the whole batch.
        """
        self.path, self.parts, self.trainable = path, parts, trainable
        self.entries = [[n for n in s.carry if n not in s.takes] for s in parts.stacks]
        self._units, self._shared = units, shared
        count = range(len(parts.stacks))
        self._forward = [Traced(self._OfStages(_Stage(self, j).Forward)) for j in count]
        kinds = ((True, True), (True, False), (False, True))
        self._backward = [
            {kind: Traced(self._OfStages(_Stage(self, j, *kind).Backward)) for kind in kinds}
            for j in count
        ]
        self._enter = [Traced(_Entry(self, j).Forward) for j in count]
        self._enter_backward = [Traced(_Entry(self, j).Backward) for j in count]
        self._loss = Traced(self._LossAndGradients)

    def Enter(self, stack: int, batch: NestedMap, number: tf.Tensor) -> NestedMap:
        """What micro-batch `number` enters a stack with."""
        return self._enter[stack](NestedMap(batch=batch, number=number, shared=self._shared))

    def EnterGradients(
        self, stack: int, batch: NestedMap, number: tf.Tensor, upstream: NestedMap
    ) -> NestedMap:
        """NestedMap(rest), from the gradients of what `Enter` gave."""
        given = NestedMap(batch=batch, number=number, shared=self._shared, upstream=upstream)
        return self._enter_backward[stack](given)

    def Loss(self, batch: NestedMap, number: tf.Tensor, carry: NestedMap) -> NestedMap:
        """NestedMap(loss, metrics, carry, rest) of a micro-batch; `carry` and `rest` are gradients."""
        given = NestedMap(batch=batch, number=number, shared=self._shared, carry=carry)
        return self._loss(given)

    def Forward(self, stack: int, given: NestedMap) -> NestedMap:
        """NestedMap(carry, loss, extras): what stages give on, and what they add to sums, zeros in the bubble."""
        return self._forward[stack](NestedMap(given=given, shared=self._shared))

    def Gradients(
        self, stack: int, given: NestedMap, carry: bool = True, weights: bool = True
    ) -> NestedMap:
        """NestedMap(carry, weights, rest): gradients of the carry, if asked for; and of weights, if asked for: a list,
        of those that are trainable, [K, n, ...], and [K, ...], zeros in the bubble."""
        return self._backward[stack][carry, weights](NestedMap(given=given, shared=self._shared))

    def Context(self, given: NestedMap, shared: NestedMap) -> Context:
        """The context of a micro-batch: `given` has it, and its number."""
        units = self._units(given.batch)
        shares = {name: n / tf.maximum(shared.units[name], 1.0) for name, n in units.items()}
        seed = randomness.fold_in(shared.seed, given.number)
        return Context(given.batch, seed, NestedMap(shares))

    def _LossAndGradients(self, given: NestedMap) -> NestedMap:
        carry, rest = given.carry.Flatten(), given.shared.rest.Flatten()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*carry, *rest])
            context = self.Context(given, given.shared)
            loss, metrics = self.parts.loss(given.shared.rest, given.carry, context)
        found = tape.gradient(loss, [*carry, *rest])
        of_carry = [_dense(g, x) for g, x in zip(found, carry, strict=False)]
        return NestedMap(
            loss=loss,
            metrics=metrics,
            carry=given.carry.Pack(of_carry),
            rest=_present(found[len(carry) :]),
        )

    @staticmethod
    def _OfStages(
        fn: Callable[[NestedMap, NestedMap], NestedMap],
    ) -> Callable[[NestedMap], NestedMap]:
        """`fn(given, shared)` of one stage as a function of NestedMap(given, shared) of all stages."""

        def of_all(both: NestedMap) -> NestedMap:
            structure = NestedMap()

            def flat(*slices: tf.Tensor) -> list[tf.Tensor]:
                nonlocal structure
                structure = fn(both.given.Pack(list(slices)), both.shared)
                return structure.Flatten()

            results = vectorized(flat, STAGE, both.given.Flatten())
            return structure.Pack(results)

        return of_all


class _Stage:
    """One stage's work on a stack, forward, and backward for the carry, the weights or both."""

    def __init__(self, programs: Programs, stack: int, carry: bool = True, weights: bool = True):
        self._programs, self._stack = programs, programs.parts.stacks[stack]
        self._trainable = programs.trainable[stack]
        self._carry, self._weights = carry, weights

    def Forward(self, given: NestedMap, shared: NestedMap) -> NestedMap:
        carry, loss, extras = self._Run(given, shared)
        sums = NestedMap(loss=loss, extras=extras)
        return NestedMap(carry=carry, **sums.Transform(lambda x: _if(given.valid, x)))

    def Backward(self, given: NestedMap, shared: NestedMap) -> NestedMap:
        trains = zip(given.weights.Flatten(), self._trainable, strict=True)
        weights = [w for w, trainable in trains if trainable] if self._weights else []
        rest = shared.rest.Flatten() if self._weights else []
        inputs = given.carry.Flatten() if self._carry else []
        watched = [*inputs, *weights, *rest]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            after, loss, _ = self._Run(given, shared)
        upstream = [*given.upstream.Flatten(), tf.ones_like(loss)]
        found = tape.gradient([*after.Flatten(), loss], watched, upstream)
        of_weights = found[len(inputs) : len(inputs) + len(weights)]
        of_rest = _present(found[len(inputs) + len(weights) :])
        result = NestedMap(
            weights=[
                _if(given.valid, _dense(g, w)) for g, w in zip(of_weights, weights, strict=True)
            ],
            rest=of_rest.Transform(lambda g: _if(given.valid, g)),
        )
        if self._carry:
            dense = [_dense(g, x) for g, x in zip(found, inputs, strict=False)]
            result.carry = given.carry.Pack(dense)
        return result

    def _Run(self, given: NestedMap, shared: NestedMap) -> tuple[NestedMap, tf.Tensor, NestedMap]:
        context = self._programs.Context(given, shared)
        return self._stack.run(given.weights, shared.rest, given.carry, context, given.first)


class _Entry:
    """What is done before the first stage of a stack."""

    def __init__(self, programs: Programs, stack: int):
        self._programs, self._stack = programs, programs.parts.stacks[stack]

    def Forward(self, given: NestedMap) -> NestedMap:
        context = self._programs.Context(given, given.shared)
        return self._stack.enter(given.shared.rest, context)

    def Backward(self, given: NestedMap) -> NestedMap:
        rest = given.shared.rest.Flatten()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(rest)
            entered = self.Forward(given)
        found = tape.gradient(entered.Flatten(), rest, given.upstream.Flatten())
        return NestedMap(rest=_present(found))


def _present(grads: Sequence[tf.Tensor | None]) -> NestedMap:
    """The gradients that there are, by their number: 'g3'."""
    return NestedMap(
        {f"g{i}": tf.convert_to_tensor(g) for i, g in enumerate(grads) if g is not None}
    )


def _dense(grad: tf.Tensor | None, like: tf.Tensor) -> tf.Tensor:
    return runtime_zeros(like, like.dtype) if grad is None else tf.convert_to_tensor(grad)


def _if(valid: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """x in float32 or wider, zeros in the bubble."""
    x = x if x.dtype.size > 4 else tf.cast(x, tf.float32)
    return tf.where(valid, x, tf.zeros([], x.dtype))
