"""Repeat: one layer applied L times over stacked weights, in a loop that compiles once for any L.

Forward is a while loop that keeps each repetition's input, and those activations that `remat` names; backward is a
while loop that computes the rest of the repetition again and differentiates it. The loops are ours, under one custom
gradient, because TensorFlow's gradient of a while loop keeps every intermediate value of every iteration.

Letters: L layer (the repetitions).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, VariableSpec, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.config.hyperparams import Params as HyperParams
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.layers.kept import NAMES
from lingvo_moe.core.nested_map import NestedMap, flatten, map_structure, pack_as
from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.sharding import DimsMapping, Mesh, current_mesh, dims_mapping
from lingvo_moe.core.sharding.annotate import mesh_split, shard_letters
from lingvo_moe.core.sharding.letters import GRADIENTS, HOST, shards
from lingvo_moe.core.sharding.mesh import traced_slices
from lingvo_moe.core.state.host_memory import to_device, to_host
from lingvo_moe.core.state.offload import of_activations, of_weight
from lingvo_moe.core.state.state_sharding import in_use
from lingvo_moe.core.tensors import (
    Annotate,
    collecting,
    replacing,
    runtime_zeros,
    sum_type,
    with_gradient_if,
)

# (index, theta of one repetition, carry, shared, seed or None) -> (carry, extras)
Body = Callable[..., tuple[tf.Tensor, NestedMap]]


@dataclass(frozen=True)
class Chunk:
    """Consecutive repetitions, e.g. those that a stage of a pipeline computes in a tick.

    Attributes:
        first: int32 scalar, the number of the first one, for the seeds; None: 0.
        count: int32 scalar, how many of those in theta are applied. The others are computed too, but whatever comes of
            it, even NaN, changes nothing: they pass the carry on, and their extras and gradients are zeros. None: all.
    """

    first: tf.Tensor | None = None
    count: tf.Tensor | None = None


ALL = Chunk()


class Repeat(BaseLayer):
    """Applies `p.body` L times: body.FProp(theta_i, carry, shared, seed=seed_i) -> (carry, extras).

    Every variable of the body gets a leading dimension L; slice i starts as a variable of its own
    would, and repetition i sees the seed folded with i. Scanned or unrolled, the values, gradients
    and structures are the same.
    """

    PART: ClassVar[str] = "loop"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("body", None, "Params of the layer that is repeated.")
        p.Define("num_repeats", 1, "L.", check=checks.LAYERS)
        p.Define("unroll", False, "Write the repetitions out instead of looping; for debugging.")
        p.Define(
            "remat",
            (),
            "The names of activations that are kept for the backward pass, and not computed again (layers/kept.py). "
            "Without a seed, in inference, none are.",
            check=checks.NamesOr((), tuple(NAMES)),
        )
        p.Define("carry_letters", "BTM", "The einsum letters of the carry.")
        p.Define(
            "parts",
            1,
            "How many parts a pipeline divides the repetitions into. Where they cannot be equal, the mesh axis of L "
            "shards another dimension of each weight.",
            check=checks.SIZE,
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        if self.p.unroll and self.p.remat:
            raise ValueError(
                f"{self.path}: remat={list(self.p.remat)} has no effect with unroll=True, which keeps every activation"
            )
        self.CreateChild("body", self.p.body)

    def VariableSpecs(self) -> NestedMap:
        """The body's specs, each with a leading dimension L, in the memory that `offload` says."""
        (axis,) = dims_mapping("L", self.p.weight_split)

        def stacked(spec: VariableSpec) -> VariableSpec:
            there = spec.trainable and not self.p.unroll and of_weight(self.p.offload, spec.path)
            spec = spec.Stacked(self.p.num_repeats, axis, parts=self.p.parts)
            return replace(spec, memory=HOST) if there else spec

        return super().VariableSpecs().Transform(stacked)

    def FProp(
        self,
        theta: NestedMap,
        carry: tf.Tensor,
        shared: NestedMap,
        seed: tf.Tensor | None = None,
        chunk: Chunk = ALL,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Runs all repetitions, or some.

        Args:
            theta: NestedMap(body=...) of stacked weights [L, ...]; or of some consecutive repetitions; or, from
                `PackWeights`, of a list with each repetition's, in inference.
            carry: the tensor passed from repetition to repetition; its shape and type stay.
            shared: tensors that every repetition sees. Everything that the body uses beside theta
                and carry must come through here: gradients do not reach tensors that the body
                merely captures.
            seed: int32 [2] or None.
            chunk: which repetitions theta holds.

        Returns:
            (carry, extras): the last carry, and the body's extras (floating point) stacked, [L,
            ...].

        Raises:
            ValueError: the body returns a carry of another shape or type. TypeError: extras that
                are not floating point.
        """
        numbers = NestedMap({n: v for n, v in vars(chunk).items() if v is not None})
        if self.p.unroll or _is_packed(theta):
            return self._Unrolled(theta, carry, shared, seed, numbers)
        kept = tuple(self.p.remat)
        stored_there = of_activations(self.p.offload)
        loop = _Loop(self._Body, self._ShardCarry, kept, self._OnHost(), stored_there)
        return _scan(loop, theta, carry, shared, seed, numbers)

    @scoped
    def SliceTheta(self, theta: NestedMap, i: int) -> NestedMap:
        """The theta of repetition i's body, on the device, for use outside of FProp (e.g. decoding)."""
        if _is_packed(theta):
            return theta.body[i]
        found = [_fetched(w[i], there) for w, there in zip(theta.Flatten(), self._OnHost())]
        return self._ShardTheta(theta.Pack(found).body)

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer: a list of the weights of each repetition."""
        each = [self.SliceTheta(theta, i) for i in range(self.p.num_repeats)]
        return NestedMap(body=[self.body.PackWeights(one, packing) for one in each])

    def ScansLayers(self) -> bool:
        """See BaseLayer."""
        return not self.p.unroll

    def _OnHost(self) -> tuple[bool, ...]:
        """Whether each weight, in the order of theta, is in the memory of the host."""
        return tuple(spec.memory == HOST for spec in self.VariableSpecs().Flatten())

    def _Unrolled(
        self,
        theta: NestedMap,
        carry: tf.Tensor,
        shared: NestedMap,
        seed: tf.Tensor | None,
        numbers: NestedMap,
    ) -> tuple[tf.Tensor, NestedMap]:
        all_extras = []
        if _is_packed(theta):
            thetas = [NestedMap(body=one) for one in theta.body]
        else:
            thetas = _slices(theta, theta.Flatten()[0].shape[0])
        for i, theta_i in enumerate(thetas):
            carry, extras = _numbered(
                self._Body, tf.constant(i), theta_i, carry, shared, seed, numbers
            )
            all_extras.append(extras)
        stacked = map_structure(lambda *values: tf.stack(values), *all_extras)
        return carry, stacked

    def _Body(
        self,
        i: tf.Tensor,
        theta: NestedMap,
        carry: tf.Tensor,
        shared: NestedMap,
        seed: tf.Tensor | None,
    ) -> tuple[tf.Tensor, NestedMap]:
        theta = self._ShardTheta(theta.body)
        seed = self.FoldSeed(self.FoldSeed(seed, "body"), i)
        carry, extras = self.body.FProp(theta, self._ShardCarry(carry), shared, seed=seed)
        return self._ShardCarry(carry), extras

    def _ShardCarry(self, x: tf.Tensor, prefix: str = "") -> tf.Tensor:
        return shard_letters(x, prefix + self.p.carry_letters, self.p.activation_split)

    def _ShardTheta(self, theta: NestedMap) -> NestedMap:
        """Annotates slices like their stacks: sharding, and the gradient's, survives slicing. Weights that the state
        holds in parts are gathered, one repetition at a time."""
        mesh = current_mesh()
        if mesh is None or mesh.size == 1:
            return theta
        slices, stacks = self.body.VariableSpecs().Flatten(), self.VariableSpecs().body.Flatten()
        items = zip(theta.Flatten(), slices, stacks, strict=True)
        return theta.Pack([self._ShardSlice(w, s.split, stack, mesh) for w, s, stack in items])

    def _ShardSlice(
        self, w: tf.Tensor, split: DimsMapping, stack: VariableSpec, mesh: Mesh
    ) -> tf.Tensor:
        if shards(self.p.shard_state, GRADIENTS):
            return in_use(w, split, stack.OverCopies().StoredSplit(mesh)[1:])
        return mesh_split(w, mesh, split) if any(split) else w

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """L times the body's."""
        meta = params.body.cls.FPropMeta(params.body, *input_shapes)
        return NestedMap(flops=params.num_repeats * meta.flops, out_shapes=meta.out_shapes)


@dataclass(frozen=True)
class _Loop:
    """A body to repeat: with `shard_carry(x, prefix letters)`, which annotates a carry or a stack of them; the names of
    the activations that are kept; for each weight, whether it is in the host's memory; and whether the activations
    that the forward pass stores for the backward pass are there too."""

    body: Body
    shard_carry: Callable[..., tf.Tensor]
    names: tuple[str, ...]
    on_host: tuple[bool, ...]
    stored_there: bool

    def Slices(self, weights: list[tf.Tensor], i: tf.Tensor) -> list[tf.Tensor]:
        """The weights of repetition i, on the device."""
        return [
            _fetched(tf.gather(w, i), there) for w, there in zip(weights, self.on_host, strict=True)
        ]


def _scan(
    loop: _Loop,
    theta: NestedMap,
    carry: tf.Tensor,
    shared: NestedMap,
    seed: tf.Tensor | None,
    numbers: NestedMap,
) -> tuple[tf.Tensor, NestedMap]:
    """See Repeat.FProp; `numbers` has first and count, where given."""
    num = theta.Flatten()[0].shape[0]
    seeds = [] if seed is None else [seed]
    structure = (theta, shared, seeds, numbers)
    # Of carries of unknown size (serving) nothing is kept: there is nothing to differentiate.
    keep = carry.shape.is_fully_defined()
    names, stored_there = (loop.names, loop.stored_there) if keep and seeds else ((), False)

    def call(i: tf.Tensor, theta_i: list, x: tf.Tensor, flat_rest: list) -> tuple[tf.Tensor, Any]:
        theta_, shared_, seeds_, numbers_ = pack_as(structure, [*theta_i, *flat_rest])
        return _numbered(loop.body, i, theta_, x, shared_, seeds_[0] if seeds_ else None, numbers_)

    forward, extras_specs, annotate = _traced(call, theta, carry, (shared, seeds, numbers), names)
    num_theta, num_extras = len(flatten(theta)), len(flatten(extras_specs))

    @private.custom_gradient
    def run(x: tf.Tensor, *flat: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        weights, rest = list(flat[:num_theta]), list(flat[num_theta:])

        def step(i: tf.Tensor, x: tf.Tensor, inputs: list, outputs: list) -> tuple:
            y, *values = forward(i, x, *loop.Slices(weights, i), *rest)
            items = zip(outputs, values, there, strict=True)
            outputs = [_write(rows, i, v, host) for rows, v, host in items]
            return i + 1, y, [_write(rows, i, x, stored_there) for rows in inputs], outputs

        there = [k >= num_extras and stored_there for k in range(len(forward.outputs) - 1)]
        inputs = [_rows(num, x.dtype, x.shape, x, stored_there)] if keep else []
        outputs = [
            _rows(num, out.dtype, out.shape, x, host)
            for out, host in zip(forward.outputs[1:], there, strict=True)
        ]
        start = (tf.constant(0), x, inputs, outputs)
        _, y, inputs, outputs = tf.while_loop(lambda i, *_: i < num, step, start)
        extras = [_stack(rows) for rows in outputs[:num_extras]]
        stacks = [_stack(rows) for rows in (*inputs, *outputs[num_extras:])]
        annotations = [loop.shard_carry, *annotate] if keep else []
        stored = [
            _Stored(a(s, "L"), a, stored_there) for s, a in zip(stacks, annotations, strict=True)
        ]

        def grad(dy: tf.Tensor, *dextras: tf.Tensor) -> list:
            if not stored:
                raise ValueError(f"no gradient through a carry of unknown size, {x.shape}")
            # What the loop recomputes has the names of the forward pass, but within this one.
            with tf.name_scope("backward/"):
                return _backward(loop, call, num, weights, rest, stored, names, dy, list(dextras))

        return [y, *extras], grad

    y, *extras = run(carry, *flatten(structure))
    return y, pack_as(extras_specs, extras)


@dataclass(frozen=True)
class _Stored:
    """An activation of all repetitions, [L, ...]; `annotate(x)` annotates that of one; whether it is on the host."""

    rows: tf.Tensor
    annotate: Callable[..., tf.Tensor]
    on_host: bool

    def Of(self, i: tf.Tensor) -> tf.Tensor:
        """That of repetition i."""
        return self.annotate(_fetched(tf.gather(self.rows, i), self.on_host))


def _backward(
    loop: _Loop,
    call: Callable,
    num: int,
    weights: list[tf.Tensor],
    rest: list[tf.Tensor],
    stored: list[_Stored],
    names: tuple[str, ...],
    dy: tf.Tensor,
    dextras: list[tf.Tensor],
) -> list[tf.Tensor | None]:
    """The gradients of (carry, *weights, *rest), from the last repetition to the first. `stored` has the carry, then
    the activations with these names."""
    floating = [k for k, t in enumerate(rest) if t.dtype.is_floating]
    used: set[int] = set()

    def step(i: tf.Tensor, dx: tf.Tensor, dweights: list, drest: list) -> tuple:
        x, *activations = [each.Of(i) for each in stored]
        slices = loop.Slices(weights, i)
        sources = [x, *slices, *(rest[k] for k in floating)]
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            replacing(names, activations),
        ):
            tape.watch(sources)
            y, extras = call(i, slices, x, rest)
        grads = tape.gradient(
            [y, *flatten(extras)], sources, [dx, *(tf.gather(d, i) for d in dextras)]
        )
        dx, *grads = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        dslices, dfloating = grads[: len(weights)], grads[len(weights) :]
        dslices = [
            runtime_zeros(s, s.dtype) if g is None else g
            for g, s in zip(dslices, slices, strict=True)
        ]
        used.update(k for k, g in zip(floating, dfloating, strict=True) if g is not None)
        drest = [
            total if g is None else total + tf.cast(g, total.dtype)
            for total, g in zip(drest, dfloating, strict=True)
        ]
        dweights = [
            _write(rows, i, tf.cast(g, rows.dtype), there)
            for rows, g, there in zip(dweights, dslices, loop.on_host, strict=True)
        ]
        return i - 1, stored[0].annotate(_known(dx, x)), dweights, drest

    # In the type of the activations: where that is bfloat16, most of these gradients are sums of
    # bfloat16 products, and stacks of float32 would be the largest thing that a device holds.
    # Those in the host's memory have the weights' type, since no operation may read the stack to cast it.
    kinds = [
        dy.dtype if dy.dtype.size < w.dtype.size and not there else w.dtype
        for w, there in zip(weights, loop.on_host, strict=True)
    ]
    dweights = [
        _rows(num, kind, w.shape[1:], dy, there)
        for kind, w, there in zip(kinds, weights, loop.on_host, strict=True)
    ]
    # Sums over L repetitions: in float32 or wider, even of bfloat16 terms.
    drest = [runtime_zeros(rest[k], sum_type(rest[k].dtype)) for k in floating]
    start = (tf.constant(num - 1), dy, dweights, drest)
    _, dx, dweights, drest = tf.while_loop(lambda i, *_: i >= 0, step, start)
    by_index = {
        k: tf.cast(total, rest[k].dtype)
        for k, total in zip(floating, drest, strict=True)
        if k in used
    }
    stacks = [tf.cast(_stack(rows), w.dtype) for rows, w in zip(dweights, weights, strict=True)]
    return [dx, *stacks, *(by_index.get(k) for k in range(len(rest)))]


def _traced(
    call: Callable, theta: NestedMap, carry: tf.Tensor, rest: tuple, names: tuple[str, ...]
) -> tuple[Any, NestedMap, list[Annotate]]:
    """The body as a function (i, carry, *one repetition's theta, *rest) -> [carry, *extras, *activations with these
    names], which is traced once; the specs of its extras; and how the activations are annotated. Raises as
    Repeat.FProp."""
    extras, annotate = NestedMap(), []
    num_theta = len(flatten(theta))

    def spec(t: tf.Tensor) -> tf.TensorSpec:
        return tf.TensorSpec(t.shape, t.dtype)

    def run(i: tf.Tensor, x: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
        nonlocal extras, annotate
        with collecting(names) as collected:
            y, extras = call(i, flat[:num_theta], x, flat[num_theta:])
        annotate = collected.annotate
        return [y, *flatten(extras), *collected.values]

    concrete = tf.function(run, autograph=False).get_concrete_function(
        tf.TensorSpec([], tf.int32),
        spec(carry),
        *(tf.TensorSpec(w.shape[1:], w.dtype) for w in flatten(theta)),
        *(spec(t) for t in flatten(rest)),
    )
    y = concrete.outputs[0]
    if y.dtype != carry.dtype or not carry.shape.is_compatible_with(y.shape):
        raise ValueError(
            f"repeat: the body turns a carry of {carry.dtype.name} {carry.shape} into "
            f"{y.dtype.name} {y.shape}; both must be the same"
        )
    for e in flatten(extras):
        if not e.dtype.is_floating:
            raise TypeError(f"repeat: extras must be floating point, got {e.dtype.name} {e.shape}")
    return concrete, map_structure(spec, extras), annotate


def _numbered(
    body: Body,
    i: tf.Tensor,
    theta: NestedMap,
    carry: tf.Tensor,
    shared: NestedMap,
    seed: tf.Tensor | None,
    numbers: NestedMap,
) -> tuple[tf.Tensor, NestedMap]:
    """Applies row i of theta: repetition i + numbers.first, or none from row numbers.count on."""
    number = i + numbers.first if "first" in numbers else i
    if "count" not in numbers:
        return body(number, theta, carry, shared, seed)
    applied = i < numbers.count

    def differentiated(x: tf.Tensor) -> tf.Tensor:
        return with_gradient_if(applied, x) if x.dtype.is_floating else x

    theta, shared = theta.Transform(differentiated), shared.Transform(differentiated)
    y, extras = body(number, theta, differentiated(carry), shared, seed)
    none = extras.Transform(lambda x: tf.where(applied, x, tf.zeros([], x.dtype)))
    return tf.where(applied, y, carry), none


def _is_packed(theta: NestedMap) -> bool:
    return isinstance(theta.body, list)


def _slices(theta: NestedMap, num: int) -> list[NestedMap]:
    layers = kernels.current().slices(theta.Flatten(), num)
    return [theta.Pack(layer) for layer in layers]


def _fetched(x: tf.Tensor, on_host: bool) -> tf.Tensor:
    return to_device(x) if on_host else x


def _rows(
    num: int, dtype: tf.DType, shape: tf.TensorShape, given: tf.Tensor, on_host: bool = False
) -> tf.TensorArray | tf.Tensor:
    """Room for what a loop collects, [num, *shape]: an array, or where slices are vectorized a tensor."""
    if traced_slices() or on_host:
        return runtime_zeros(given, dtype, [num, *shape])
    return tf.TensorArray(dtype, num, element_shape=shape, clear_after_read=False)


def _write(
    rows: tf.TensorArray | tf.Tensor, i: tf.Tensor, x: tf.Tensor, on_host: bool = False
) -> tf.TensorArray | tf.Tensor:
    if isinstance(rows, tf.TensorArray):
        return rows.write(i, x)
    return kernels.current().with_row(rows, i, to_host(x) if on_host else x)


def _stack(rows: tf.TensorArray | tf.Tensor) -> tf.Tensor:
    return rows.stack() if isinstance(rows, tf.TensorArray) else rows


def _known(dx: tf.Tensor | None, x: tf.Tensor) -> tf.Tensor:
    return runtime_zeros(x, x.dtype) if dx is None else dx
