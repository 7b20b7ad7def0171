"""Repeat: one layer applied L times over stacked weights, in a loop (scan.py) that compiles once for any L.

Letters: L layer (the repetitions).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, VariableSpec, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.layers.kept import DOTS, FULL, names_of
from lingvo_moe.core.layers.scan import Given, Loop, fetched
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.sharding import DimsMapping, Mesh, current_mesh, dims_mapping
from lingvo_moe.core.sharding.annotate import mesh_split, shard_letters
from lingvo_moe.core.sharding.letters import GRADIENTS, HOST, shards
from lingvo_moe.core.state.offload import of_activations, of_weight
from lingvo_moe.core.state.state_sharding import in_use
from lingvo_moe.core.tensors import with_gradient_if


@dataclass(frozen=True)
class Chunk:
    """Consecutive repetitions, e.g. those that a stage of a pipeline computes in a tick."""

    # Int32 scalar, the number of the first one, for the seeds. None: 0.
    first: tf.Tensor | None = None
    # Int32 scalar, how many of those in theta are applied. The others are computed too, but whatever comes of it,
    # even NaN, changes nothing: they pass the carry on, and their extras and gradients are zeros. None: all.
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
        p.Define("num_repeats", 1, "L.", checks.LAYERS)
        p.Define("unroll", False, "Write the repetitions out instead of looping; for debugging.")
        p.Define(
            "remat",
            FULL,
            "The activations that are kept for the backward pass, and not computed again (layers/kept.py). "
            "Without a seed, in inference, none are.",
            checks.NamesOr((FULL, DOTS), ()),
        )
        p.Define("carry_letters", "BTM", "The einsum letters of the carry.")
        p.Define(
            "parts",
            1,
            "How many parts a pipeline divides the repetitions into. Where they cannot be equal, the mesh axis of L "
            "shards another dimension of each weight.",
            checks.SIZE,
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        self.CreateChild("body", self.p.body)
        self._kept = names_of(self.p.remat, self.body.DeclaredKeeps())
        if self.p.unroll and self._kept:
            raise ValueError(
                f"{self.path}: remat={list(self._kept)} has no effect with unroll=True, which keeps every activation"
            )

    def VariableSpecs(self) -> NestedMap:
        """The body's specs, each with a leading dimension L, in the memory that `offload` says."""
        (axis,) = dims_mapping("L", self.p.weight_split)
        parts = self.DeclaredParts()

        def stacked(spec: VariableSpec) -> VariableSpec:
            hosted = of_weight(self.p.offload, spec.path, parts)
            there = spec.trainable and not self.p.unroll and hosted
            spec = spec.Stacked(self.p.num_repeats, axis, parts=self.p.parts)
            return replace(spec, memory=HOST) if there else spec

        return super().VariableSpecs().Transform(stacked)

    def ActiveParameters(self) -> int:
        return self.p.num_repeats * super().ActiveParameters()

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
                merely captures. Repetition i sees row i of the entries [L, ...] of
                `shared.by_repetition`, if there is one, beside the other entries.
            seed: int32 [2] or None.

        Returns:
            (carry, extras): the last carry, and the body's extras (floating point) stacked, [L,
            ...].

        Raises:
            ValueError: the body returns a carry of another shape or type. TypeError: extras that
                are not floating point.
        """
        numbers = NestedMap({n: v for n, v in vars(chunk).items() if v is not None})
        args = Given(shared, [] if seed is None else [seed], numbers)
        if self.p.unroll or _is_packed(theta):
            return self._Unrolled(theta, carry, args)
        loop = Loop(
            self._Numbered,
            self._ShardCarry,
            self._kept,
            self._OnHost(),
            of_activations(self.p.offload),
        )
        return loop.Run(theta, carry, args)

    @scoped
    def SliceTheta(self, theta: NestedMap, i: int) -> NestedMap:
        """The theta of repetition i's body, on the device, for use outside of FProp (e.g. decoding)."""
        if _is_packed(theta):
            return theta.body[i]
        weights = [fetched(w[i], there) for w, there in zip(theta.Flatten(), self._OnHost())]
        return self._ShardTheta(theta.Pack(weights).body)

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer: a list of the weights of each repetition."""
        thetas = [self.SliceTheta(theta, i) for i in range(self.p.num_repeats)]
        return NestedMap(body=[self.body.PackWeights(one, packing) for one in thetas])

    def ScansLayers(self) -> bool:
        return not self.p.unroll

    def _OnHost(self) -> tuple[bool, ...]:
        """Whether each weight, in the order of theta, is in the memory of the host."""
        return tuple(spec.memory == HOST for spec in self.VariableSpecs().Flatten())

    def _Unrolled(
        self, theta: NestedMap, carry: tf.Tensor, args: Given
    ) -> tuple[tf.Tensor, NestedMap]:
        all_extras = []
        if _is_packed(theta):
            thetas = [NestedMap(body=one) for one in theta.body]
        else:
            thetas = slices(theta)
        for i, theta_i in enumerate(thetas):
            carry, extras = self._Numbered(tf.constant(i), theta_i, carry, args)
            all_extras.append(extras)
        stacked = map_structure(lambda *values: tf.stack(values), *all_extras)
        return carry, stacked

    def _Numbered(
        self, i: tf.Tensor, theta: NestedMap, carry: tf.Tensor, args: Given
    ) -> tuple[tf.Tensor, NestedMap]:
        """Applies row i of theta: repetition i + numbers.first, or none from row numbers.count on."""
        shared, seeds, numbers = args
        seed = seeds[0] if seeds else None
        number = i + numbers.first if "first" in numbers else i
        if "count" not in numbers:
            return self._Body(number, theta, carry, shared, seed)
        applied = i < numbers.count

        def differentiated(x: tf.Tensor) -> tf.Tensor:
            return with_gradient_if(applied, x) if x.dtype.is_floating else x

        theta, shared = theta.Transform(differentiated), shared.Transform(differentiated)
        y, extras = self._Body(number, theta, differentiated(carry), shared, seed)
        none = extras.Transform(lambda x: tf.where(applied, x, tf.zeros([], x.dtype)))
        return tf.where(applied, y, carry), none

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
        if "by_repetition" in shared:
            rows = shared.by_repetition.Transform(lambda x: tf.gather(x, i))
            shared = NestedMap({n: x for n, x in shared.items() if n != "by_repetition"}, **rows)
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
        return map_structure(
            lambda w, of_slice, stack: self._ShardSlice(w, of_slice.split, stack, mesh),
            theta,
            self.body.VariableSpecs(),
            self.VariableSpecs().body,
        )

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


def slices(theta: NestedMap) -> list[NestedMap]:
    """The weights of each repetition, from stacked ones [L, ...]."""
    weights = theta.Flatten()
    return [theta.Pack(w) for w in kernels.current().slices(weights, weights[0].shape[0])]


def _is_packed(theta: NestedMap) -> bool:
    return isinstance(theta.body, list)
