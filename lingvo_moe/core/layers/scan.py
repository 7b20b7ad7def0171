"""The loops of a repeated body: a forward loop over stacked weights, and a backward loop that computes again.

Forward is a while loop that keeps each repetition's input, and those activations that the loop names; backward is a
while loop that computes the rest of the repetition again and differentiates it. The loops are ours, under one custom
gradient, because TensorFlow's gradient of a while loop keeps every intermediate value of every iteration.

Letters: L layer (the repetitions).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap, flatten, map_structure, pack_as
from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.sharding.mesh import traced_slices
from lingvo_moe.core.state.host_memory import to_device, to_host
from lingvo_moe.core.tensors import (
    Annotate,
    collecting,
    or_zeros,
    replacing,
    runtime_zeros,
    sum_type,
    with_row,
)


class Given(NamedTuple):
    """The arguments that all repetitions get."""

    shared: NestedMap  # tensors that the body reads beside its weights and the carry
    seeds: list[tf.Tensor]  # one, int32 [2], or none
    numbers: NestedMap  # int32 scalars `first` and `count` of the repetitions, where they are given


# (index, theta of one repetition, carry, given) -> (carry, extras)
Body = Callable[[tf.Tensor, NestedMap, tf.Tensor, Given], tuple[tf.Tensor, NestedMap]]
_Rows: TypeAlias = tf.TensorArray | tf.Tensor  # what a loop collects, [L, ...]


@dataclass(frozen=True)
class Loop:
    """A body to repeat."""

    body: Body
    # Of a carry, or of a stack of them, whose letters start with the prefix given.
    shard_carry: Annotate
    names: tuple[str, ...]  # the names of the activations that are kept
    on_host: tuple[bool, ...]  # for each weight, whether it is in the host's memory
    # Whether the activations that are stored for the backward pass are there too.
    stored_there: bool

    def Run(self, theta: NestedMap, carry: tf.Tensor, args: Given) -> tuple[tf.Tensor, NestedMap]:
        """See Repeat.FProp."""
        # Of carries of unknown size (serving) nothing is kept: there is nothing to differentiate.
        keep = carry.shape.is_fully_defined()
        names, stored_there = self.names, self.stored_there
        if not keep or not args.seeds:
            names, stored_there = (), False
        one = _Repetition(self, theta, carry, args, names)
        num, num_theta = theta.Flatten()[0].shape[0], len(flatten(theta))
        num_extras = len(flatten(one.extras))

        @private.custom_gradient
        def run(x: tf.Tensor, *flat: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
            weights, rest = list(flat[:num_theta]), list(flat[num_theta:])

            def step(i: tf.Tensor, x: tf.Tensor, inputs: list, outputs: list) -> tuple:
                y, *values = one.forward(i, x, *one.Slices(weights, i), *rest)
                items = zip(outputs, values, there, strict=True)
                outputs = [_write(rows, i, v, host) for rows, v, host in items]
                return i + 1, y, [_write(rows, i, x, stored_there) for rows in inputs], outputs

            results = one.forward.outputs[1:]
            there = [k >= num_extras and stored_there for k in range(len(results))]
            inputs = [_rows(num, x.dtype, x.shape, x, stored_there)] if keep else []
            outputs = [
                _rows(num, out.dtype, out.shape, x, host)
                for out, host in zip(results, there, strict=True)
            ]
            start = (tf.constant(0), x, inputs, outputs)
            _, y, inputs, outputs = tf.while_loop(lambda i, *_: i < num, step, start)
            extras = [_stack(rows) for rows in outputs[:num_extras]]
            stacks = [_stack(rows) for rows in (*inputs, *outputs[num_extras:])]
            annotations = [self.shard_carry, *one.annotate] if keep else []
            stored = [
                _Stored(a(s, "L"), a, stored_there)
                for s, a in zip(stacks, annotations, strict=True)
            ]

            def grad(dy: tf.Tensor, *dextras: tf.Tensor) -> list:
                if not stored:
                    raise ValueError(f"no gradient through a carry of unknown size, {x.shape}")
                # What the loop recomputes has the names of the forward pass, but within this one.
                with tf.name_scope("backward/"):
                    return _backward(one, weights, rest, stored, [dy, *dextras])

            return [y, *extras], grad

        y, *extras = run(carry, *flatten((theta, args)))
        return y, pack_as(one.extras, extras)


class _Repetition:
    """One repetition as a function of flat lists of tensors: its theta, and the tensors of `args`."""

    def __init__(
        self, loop: Loop, theta: NestedMap, carry: tf.Tensor, args: Given, names: tuple[str, ...]
    ):
        """Traces the body once, as `forward`: (i, carry, *theta, *given) -> [carry, *extras, *activations with these
        names]. `extras` has the specs of its extras, `annotate` how each activation is annotated.

        Raises: as Repeat.FProp.
        """
        self.on_host, self.names = loop.on_host, names
        self._body, self._structure = loop.body, (theta, args)
        num_theta = len(flatten(theta))

        def spec(t: tf.Tensor) -> tf.TensorSpec:
            return tf.TensorSpec(t.shape, t.dtype)

        def run(i: tf.Tensor, x: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
            with collecting(names) as collected:
                y, self.extras = self.Call(i, x, flat[:num_theta], flat[num_theta:])
            self.annotate = collected.annotate
            return [y, *flatten(self.extras), *collected.values]

        self.forward = tf.function(run, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.int32),
            spec(carry),
            *(tf.TensorSpec(w.shape[1:], w.dtype) for w in flatten(theta)),
            *(spec(t) for t in flatten(args)),
        )
        y = self.forward.outputs[0]
        if y.dtype != carry.dtype or not carry.shape.is_compatible_with(y.shape):
            raise ValueError(
                f"repeat: the body turns a carry of {carry.dtype.name} {carry.shape} into "
                f"{y.dtype.name} {y.shape}; both must be the same"
            )
        for e in flatten(self.extras):
            if not e.dtype.is_floating:
                raise TypeError(
                    f"repeat: extras must be floating point, got {e.dtype.name} {e.shape}"
                )
        self.extras = map_structure(spec, self.extras)

    def Call(
        self, i: tf.Tensor, x: tf.Tensor, theta: Sequence[tf.Tensor], args: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, NestedMap]:
        """(carry, extras) of repetition i, whose carry is x."""
        theta_i, given_ = pack_as(self._structure, [*theta, *args])
        return self._body(i, theta_i, x, given_)

    def Slices(self, weights: list[tf.Tensor], i: tf.Tensor) -> list[tf.Tensor]:
        """The weights of repetition i, on the device."""
        items = zip(weights, self.on_host, strict=True)
        return [fetched(tf.gather(w, i), there) for w, there in items]


@dataclass(frozen=True)
class _Stored:
    """An activation of all repetitions, [L, ...]; `annotate(x)` annotates that of one; whether it is on the host."""

    rows: tf.Tensor
    annotate: Annotate
    on_host: bool

    def Of(self, i: tf.Tensor) -> tf.Tensor:
        """The activation of repetition i, on the device."""
        return self.annotate(fetched(tf.gather(self.rows, i), self.on_host))


def _backward(
    one: _Repetition,
    weights: list[tf.Tensor],
    rest: list[tf.Tensor],
    stored: list[_Stored],
    upstream: list[tf.Tensor],
) -> list[tf.Tensor | None]:
    """The gradients of (carry, *weights, *rest), from the last repetition to the first.

    Args:
        weights: [L, ...] each.
        stored: the carry, then the activations that were kept.
        upstream: the gradients of the last carry, and of the extras [L, ...].
    """
    dy, *dextras = upstream
    floating = [k for k, t in enumerate(rest) if t.dtype.is_floating]
    used: set[int] = set()

    def step(i: tf.Tensor, dx: tf.Tensor, dweights: list, drest: list) -> tuple:
        x, *activations = [stack.Of(i) for stack in stored]
        slices = one.Slices(weights, i)
        sources = [x, *slices, *(rest[k] for k in floating)]
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            replacing(one.names, activations),
        ):
            tape.watch(sources)
            y, extras = one.Call(i, x, slices, rest)
        grads = tape.gradient(
            [y, *flatten(extras)], sources, [dx, *(tf.gather(d, i) for d in dextras)]
        )
        dx, *grads = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        dslices, dfloating = grads[: len(weights)], grads[len(weights) :]
        dslices = [or_zeros(g, s) for g, s in zip(dslices, slices, strict=True)]
        used.update(k for k, g in zip(floating, dfloating, strict=True) if g is not None)
        drest = [
            total if g is None else total + tf.cast(g, total.dtype)
            for total, g in zip(drest, dfloating, strict=True)
        ]
        dweights = [
            _write(rows, i, tf.cast(g, rows.dtype), there)
            for rows, g, there in zip(dweights, dslices, one.on_host, strict=True)
        ]
        return i - 1, stored[0].annotate(or_zeros(dx, x)), dweights, drest

    dweights = [_gradient_rows(w, dy, there) for w, there in zip(weights, one.on_host, strict=True)]
    # Sums over L repetitions: in float32 or wider, even of bfloat16 terms.
    drest = [runtime_zeros(rest[k], sum_type(rest[k].dtype)) for k in floating]
    start = (tf.constant(weights[0].shape[0] - 1), dy, dweights, drest)
    _, dx, dweights, drest = tf.while_loop(lambda i, *_: i >= 0, step, start)
    sums = dict(zip(floating, drest, strict=True))
    stacks = [tf.cast(_stack(rows), w.dtype) for rows, w in zip(dweights, weights, strict=True)]
    of_rest = [tf.cast(sums[k], t.dtype) if k in used else None for k, t in enumerate(rest)]
    return [dx, *stacks, *of_rest]


def _gradient_rows(w: tf.Tensor, dy: tf.Tensor, on_host: bool) -> _Rows:
    """Room for the gradients of weights [L, ...].

    In the type of the activations: where that is bfloat16, most of these gradients are sums of bfloat16 products, and
    stacks of float32 would be the largest thing that a device holds. Those in the host's memory have the weights'
    type, since no operation may read the stack to cast it.
    """
    narrower = dy.dtype.size < w.dtype.size and not on_host
    return _rows(w.shape[0], dy.dtype if narrower else w.dtype, w.shape[1:], dy, on_host)


def fetched(x: tf.Tensor, on_host: bool) -> tf.Tensor:
    """A repetition's part of a stack, on the device."""
    return to_device(x) if on_host else x


def _rows(
    num: int, dtype: tf.DType, shape: tf.TensorShape, like: tf.Tensor, on_host: bool
) -> _Rows:
    """Room for what a loop collects, [num, *shape]: an array, or where slices are vectorized a tensor."""
    if traced_slices() or on_host:
        return runtime_zeros(like, dtype, [num, *shape])
    return tf.TensorArray(dtype, num, element_shape=shape, clear_after_read=False)


def _write(rows: _Rows, i: tf.Tensor, x: tf.Tensor, on_host: bool) -> _Rows:
    if isinstance(rows, tf.TensorArray):
        return rows.write(i, x)
    return with_row(rows, i, to_host(x) if on_host else x)


def _stack(rows: _Rows) -> tf.Tensor:
    return rows.stack() if isinstance(rows, tf.TensorArray) else rows
