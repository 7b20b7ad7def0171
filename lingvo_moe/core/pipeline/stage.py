"""The computation of a tick: the work of all stages at once, and that for one micro-batch before the first
stage and after the last.

The work of stages is a function of one stage, vectorized over them (core/sharding/vectorized.py). In the bubble a stage
computes on rubbish; what it would add to a sum is selected away, never multiplied by zero, so that NaN there changes
nothing.

Letters: K stages, n blocks of a stage at a time, D micro-batches at the same time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.input.division import shares_of
from lingvo_moe.core.layers.repeat import Chunk
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context, Parts
from lingvo_moe.core.pipeline.schedule import DATA, STAGE
from lingvo_moe.core.sharding.vectorized import vectorized
from lingvo_moe.core.tensors import or_zeros, term_if


class TracedOnce:
    """A function of a NestedMap of tensors that returns one, traced at its first call for all loops that call it."""

    def __init__(self, fn: Callable[[NestedMap], NestedMap]):
        self._fn = fn
        self._concrete: Any = None
        self._structure = NestedMap()

    def __call__(self, args: NestedMap) -> NestedMap:
        specs = args.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
        return self.Results(specs).Pack(list(self._Concrete(specs)(*args.Flatten())))

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

    `parts` has the D micro-batches that the devices along axis `data` work on at the same time, each on one: a
    NestedMap of tensors [D, ...]: batch; number, int32; and where a function needs it carry, or upstream, the
    gradients of the carry afterwards. `args`, of all stages' work, is a NestedMap of tensors [K, ...]: weights,
    [K, n, ...]; first, int32, the number of the first block; count, int32, how many of the n blocks are no padding,
    or None if all stages have n; valid, bool, false in the bubble; and parts, [K, D, ...].

    Gradients of weights outside of the stacks are a NestedMap `rest`, of those that have any: 'g3' is that of the
    fourth leaf of shared.rest. Gradients of weights have a dimension D: the sum over it is left to the end of the step,
    so that devices along `data` exchange gradients once.

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
        self._forward = [TracedOnce(self._Forward(j)) for j in count]
        kinds = ((True, True), (True, False), (False, True))
        self._backward = [
            {kind: TracedOnce(self._Backward(j, *kind)) for kind in kinds} for j in count
        ]
        edges = [_Edge(self, j) for j in count]
        self._enter = [TracedOnce(_of_replicas(edge.Enter)) for edge in edges]
        self._enter_backward = [TracedOnce(_of_replicas(edge.EnterBackward)) for edge in edges]
        self._loss = TracedOnce(_of_replicas(edges[-1].LossAndGradients))

    def _Forward(self, stack: int) -> "_OfAll":
        if (cells := self.parts.stacks[stack].cells) is not None:
            return lambda both: cells.Forward(both.args, both.shared)
        return _of_stages(_Stage(self, stack).Forward)

    def _Backward(self, stack: int, carry: bool, weights: bool) -> "_OfAll":
        if (cells := self.parts.stacks[stack].cells) is not None:
            return lambda both: cells.Backward(both.args, both.shared, carry, weights)
        return _of_stages(_Stage(self, stack, carry, weights).Backward)

    def Enter(self, stack: int, parts: NestedMap) -> NestedMap:
        """Computes the activations with which micro-batches enter a stack, [D, ...]."""
        return self._enter[stack](NestedMap(args=parts, shared=self._shared))

    def EnterGradients(self, stack: int, parts: NestedMap) -> NestedMap:
        """NestedMap(rest), from parts.upstream, the gradients of what `Enter` gave."""
        return self._enter_backward[stack](NestedMap(args=parts, shared=self._shared))

    def Loss(self, parts: NestedMap) -> NestedMap:
        """NestedMap(loss, metrics, carry, rest) of micro-batches, [D, ...]; `carry` and `rest` are gradients."""
        return self._loss(NestedMap(args=parts, shared=self._shared))

    def Forward(self, stack: int, args: NestedMap) -> NestedMap:
        """NestedMap(carry, loss, extras), [K, D, ...]: what stages give on, and what they add to sums, zeros in the
        bubble."""
        return self._forward[stack](NestedMap(args=args, shared=self._shared))

    def Gradients(
        self, stack: int, args: NestedMap, carry: bool = True, weights: bool = True
    ) -> NestedMap:
        """NestedMap(carry, weights, rest): gradients of the carry, if asked for; and of weights, if asked for: a list,
        of those that are trainable, [K, D, n, ...], and [K, D, ...], zeros in the bubble."""
        return self._backward[stack][carry, weights](NestedMap(args=args, shared=self._shared))

    def Context(self, part: NestedMap, shared: NestedMap) -> Context:
        """The context of a micro-batch."""
        shares = shares_of(self._units(part.batch), shared.units)
        seed = randomness.fold_in(shared.seed, part.number)
        return Context(part.batch, seed, shares)


# NestedMap(args, shared) -> results, all tensors [D, ...] or [K, ...] but those in shared.
_OfAll = Callable[[NestedMap], NestedMap]


def _of_stages(fn: Callable[[NestedMap, NestedMap], NestedMap]) -> _OfAll:
    """`fn(args, shared)` of one stage, for all."""
    return lambda both: _mapped(lambda args: fn(args, both.shared), STAGE, both.args)


def _of_replicas(fn: Callable[[NestedMap, NestedMap], NestedMap]) -> _OfAll:
    """`fn(part, shared)` of one micro-batch, for D of them."""
    return lambda both: _mapped_over_data(lambda part: fn(part, both.shared), both.args)


def _mapped_over_data(fn: Callable[[NestedMap], NestedMap], parts: NestedMap) -> NestedMap:
    if parts.number.shape[0] > 1:
        return _mapped(fn, DATA, parts)
    return fn(parts.Transform(lambda x: x[0])).Transform(lambda x: x[tf.newaxis])


def _mapped(fn: Callable[[NestedMap], NestedMap], axis: str, elems: NestedMap) -> NestedMap:
    """`fn` of one slice of `elems`, for all of them."""
    structure = NestedMap()

    def flat(*slices: tf.Tensor) -> list[tf.Tensor]:
        nonlocal structure
        structure = fn(elems.Pack(list(slices)))
        return structure.Flatten()

    results = vectorized(flat, axis, elems.Flatten())
    return structure.Pack(results)


class _Stage:
    """One stage's work on a stack, forward, and backward for the carry, the weights or both."""

    def __init__(self, programs: Programs, stack: int, carry: bool = True, weights: bool = True):
        self._programs, self._stack = programs, programs.parts.stacks[stack]
        self._trainable = programs.trainable[stack]
        self._carry, self._weights = carry, weights

    def Forward(self, args: NestedMap, shared: NestedMap) -> NestedMap:
        def forward(part: NestedMap) -> NestedMap:
            carry, loss, extras = self._Run(part, args, shared)
            sums = NestedMap(loss=loss, extras=extras)
            return NestedMap(carry=carry, **sums.Transform(lambda x: term_if(args.valid, x)))

        return _mapped_over_data(forward, args.parts)

    def Backward(self, args: NestedMap, shared: NestedMap) -> NestedMap:
        return _mapped_over_data(lambda part: self._BackwardOfPart(part, args, shared), args.parts)

    def _BackwardOfPart(self, part: NestedMap, args: NestedMap, shared: NestedMap) -> NestedMap:
        trains = zip(args.weights.Flatten(), self._trainable, strict=True)
        weights = [w for w, trainable in trains if trainable] if self._weights else []
        rest = shared.rest.Flatten() if self._weights else []
        inputs = part.carry.Flatten() if self._carry else []
        watched = [*inputs, *weights, *rest]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            after, loss, _ = self._Run(part, args, shared)
        upstream = [*part.upstream.Flatten(), tf.ones_like(loss)]
        gradients = tape.gradient([*after.Flatten(), loss], watched, upstream)
        of_weights = gradients[len(inputs) : len(inputs) + len(weights)]
        of_rest = _present(gradients[len(inputs) + len(weights) :])
        result = NestedMap(
            weights=[
                term_if(args.valid, or_zeros(g, w))
                for g, w in zip(of_weights, weights, strict=True)
            ],
            rest=of_rest.Transform(lambda g: term_if(args.valid, g)),
        )
        if self._carry:
            dense = [or_zeros(g, x) for g, x in zip(gradients, inputs, strict=False)]
            result.carry = part.carry.Pack(dense)
        return result

    def _Run(
        self, part: NestedMap, args: NestedMap, shared: NestedMap
    ) -> tuple[NestedMap, tf.Tensor, NestedMap]:
        context = self._programs.Context(part, shared)
        chunk = Chunk(args.first, args.get("count"))
        assert self._stack.run is not None
        return self._stack.run(args.weights, shared.rest, part.carry, context, chunk)


class _Edge:
    """The work for a micro-batch before the first stage of a stack, and after the last stage of the last one."""

    def __init__(self, programs: Programs, stack: int):
        self._programs, self._stack = programs, programs.parts.stacks[stack]

    def Enter(self, part: NestedMap, shared: NestedMap) -> NestedMap:
        return self._stack.enter(shared.rest, self._programs.Context(part, shared))

    def EnterBackward(self, part: NestedMap, shared: NestedMap) -> NestedMap:
        rest = shared.rest.Flatten()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(rest)
            entered = self.Enter(part, shared)
        grads = tape.gradient(floating(entered).Flatten(), rest, part.upstream.Flatten())
        return NestedMap(rest=_present(grads))

    def LossAndGradients(self, part: NestedMap, shared: NestedMap) -> NestedMap:
        floats, rest = floating(part.carry), shared.rest.Flatten()
        carry = floats.Flatten()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*carry, *rest])
            context = self._programs.Context(part, shared)
            loss, metrics = self._programs.parts.loss(shared.rest, part.carry, context)
        grads = tape.gradient(loss, [*carry, *rest])
        of_carry = [or_zeros(g, x) for g, x in zip(grads, carry, strict=False)]
        return NestedMap(
            loss=loss,
            metrics=metrics,
            carry=floats.Pack(of_carry),
            rest=_present(grads[len(carry) :]),
        )


def floating(carry: NestedMap) -> NestedMap:
    """The entries of a carry that have gradients."""
    return NestedMap({name: x for name, x in carry.items() if x.dtype.is_floating})


def _present(grads: Sequence[tf.Tensor | None]) -> NestedMap:
    """The gradients that there are, by their number: 'g3'."""
    return NestedMap(
        {f"g{i}": tf.convert_to_tensor(g) for i, g in enumerate(grads) if g is not None}
    )
