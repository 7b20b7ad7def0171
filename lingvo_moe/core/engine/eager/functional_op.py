"""A function of flat tensors as one eager operation: compiled for a mesh, run there, differentiable.

The gradient is such an operation again, of the arguments and the results' cotangents, so there are
gradients of every order. It recomputes the function instead of keeping intermediate values. Tensors
move to the devices and back through the host's memory; a gradient reuses the arguments that its
operation has already moved to the devices.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from lingvo_moe.core.console.mistakes import noting_places
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.engine.lowering.tracing import spec_of
from lingvo_moe.core.engine.pjrt import CompiledProgram, PjrtEngine
from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.private.tensorflow import forwardprop_util, record
from lingvo_moe.core.sharding import ShardingError, use_mesh

# From the specs of the results to their shardings; AUTO: the partitioner chooses.
ChooseSplits = Callable[[list[TensorSpec]], Any]


class Operation:
    """One function of tensors with known shapes.

    Attributes:
        name: of the function, for messages.
        args, results: specs of the flat tensors.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Sequence[Any]],
        args: Sequence[TensorSpec],
        engine: PjrtEngine,
        choose_splits: ChooseSplits,
    ):
        """Args: `fn` takes as many tensors as `args` has specs, and returns a list of tensors.

        Raises:
            ShardingError: `fn` reads a variable that is not among its arguments; or as its annotations.
            LoweringError: a result without a static shape.
        """
        self.name, self.args, self._engine = name, list(args), engine
        self._fn = _with_parameters(fn, [spec.name for spec in args])
        graph = self._Trace()
        self._gradients: dict[tuple[int, ...], tuple[Operation, list[int]]] = {}
        self._captured = [x for x in graph.external_captures if isinstance(x, tf.Tensor)]
        outputs = enumerate(graph.structured_outputs)
        self.results = [spec_of(f"{name}: result[{i}]", y) for i, y in outputs]
        self._splits = choose_splits(self.results)

    def __call__(self, *tensors: tf.Tensor, placed: Sequence[Any] = ()) -> list[tf.Tensor]:
        """Returns the results as eager tensors.

        `placed` are the first of these tensors, where the devices hold them already.
        """
        watched = [x for x in self._captured if record.should_record_backprop([x])]
        if watched:
            raise ShardingError(
                f"{self.name}: uses a tensor of shape {watched[0].shape} that a GradientTape watches "
                "but that is not among its arguments, so no gradient could reach it; pass it as one"
            )
        if forwardprop_util.pack_tangents(list(tensors)).tangents:
            raise ShardingError(
                f"{self.name}: a ForwardAccumulator watches an argument; gradients here are backward "
                "ones, of a GradientTape"
            )
        # What no tape watches, as a batch of data, needs no gradient computed.
        wanted = tuple(i for i, x in enumerate(tensors) if record.should_record_backprop([x]))

        @private.custom_gradient
        def run(*tensors: tf.Tensor) -> Any:
            on_devices = [
                self._engine.PutLeaf(x if i < len(placed) else x.numpy(), spec)
                for i, (x, spec) in enumerate(
                    zip([*placed, *tensors[len(placed) :]], self.args, strict=True)
                )
            ]
            out = [tf.constant(y) for y in self._engine.Get(self.compiled(*on_devices))]

            def gradient(*cotangents: tf.Tensor) -> list[tf.Tensor | None]:
                return self._Gradient(wanted, tensors, on_devices, cotangents)

            return out, gradient

        return run(*tensors)

    @functools.cached_property
    def program(self) -> Program:
        """Lowered for the mesh."""
        results: Any = self._splits
        if results is not AUTO:
            pairs = zip(self.results, results, strict=True)
            results = [replace(spec, split=split) for spec, split in pairs]
        return lower(self._fn, self.args, self._engine.mesh, results=results, name=self.name)

    @functools.cached_property
    def compiled(self) -> CompiledProgram:
        """The function's program, compiled for the engine's devices."""
        return self._engine.Compile(self.program)

    def Gradient(self, by: Sequence[int] | None = None) -> "Operation":
        """The gradient of the floating-point results by the floating-point arguments that they depend on.

        It takes all arguments, then the cotangents of those results.

        `by` are the numbers of the arguments to differentiate by; by default all.
        """
        return self._GradientBy(range(len(self.args)) if by is None else by)[0]

    def _GradientBy(self, by: Sequence[int]) -> "tuple[Operation, list[int]]":
        """`Gradient`, and the numbers of the arguments whose gradients it returns."""
        wanted = tuple(i for i in by if _is_differentiable(self.args[i]))
        if wanted not in self._gradients:
            self._gradients[wanted] = self._MakeGradient(wanted)
        return self._gradients[wanted]

    def _MakeGradient(self, wanted: tuple[int, ...]) -> "tuple[Operation, list[int]]":
        count, connected = len(self.args), list[int]()
        chosen = self._Differentiable()

        def gradient(*tensors: tf.Tensor) -> list[tf.Tensor]:
            args, cotangents = list(tensors[:count]), list(tensors[count:])
            with tf.GradientTape() as tape:
                tape.watch([args[i] for i in wanted])
                out = self._fn(*args)
            grads = tape.gradient(
                [out[i] for i in chosen], [args[i] for i in wanted], output_gradients=cotangents
            )
            connected[:] = [i for i, g in zip(wanted, grads) if g is not None]
            return [tf.convert_to_tensor(g) for g in grads if g is not None]  # IndexedSlices too

        splits = [()] * len(self.results) if self._splits is AUTO else self._splits
        taken = {spec.name for spec in self.args}
        names = (n for n in map("cotangent_{}".format, itertools.count()) if n not in taken)
        cotangents = [
            replace(self.results[i], split=splits[i], name=name) for i, name in zip(chosen, names)
        ]

        def as_arguments(specs: list[TensorSpec]) -> list[Any]:
            return [self.args[i].split for i in connected]

        args = [*self.args, *cotangents]
        name = f"gradient of {self.name}"
        return Operation(name, gradient, args, self._engine, as_arguments), connected

    def _Gradient(
        self,
        wanted: tuple[int, ...],
        tensors: Sequence[tf.Tensor],
        on_devices: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> list[tf.Tensor | None]:
        if not tf.executing_eagerly():
            raise ShardingError(
                f"{self.name}: its gradient was asked for inside a tf.function, but it is a program of "
                "its own, run from eager code. For tape.jacobian give experimental_use_pfor=False, and "
                "the tape persistent=True"
            )
        chosen = self._Differentiable()
        gradients: list[tf.Tensor | None] = [None] * len(self.args)
        if not chosen or not any(_is_differentiable(self.args[i]) for i in wanted):
            return gradients
        pairs = [(self.results[i], cotangents[i]) for i in chosen]
        upstream = [
            tf.zeros(spec.shape, spec.dtype) if dy is None else tf.convert_to_tensor(dy)
            for spec, dy in pairs
        ]
        operation, connected = self._GradientBy(wanted)
        results = operation(*tensors, *upstream, placed=on_devices) if connected else []
        for i, g in zip(connected, results, strict=True):
            gradients[i] = g
        return gradients

    def _Differentiable(self) -> list[int]:
        return [i for i, r in enumerate(self.results) if _is_differentiable(r)]

    def _Trace(self) -> Any:
        """The function's graph, made under the mesh without compiling anything."""
        with use_mesh(self._engine.mesh), noting_places():
            concrete = tf.function(self._fn, autograph=False).get_concrete_function(
                *[tf.TensorSpec(s.shape, s.dtype, name=s.name) for s in self.args]
            )
        if concrete.graph.variables:
            names = ", ".join(sorted(repr(v.name) for v in concrete.graph.variables))
            raise ShardingError(
                f"{self.name}: reads variables that are not among its arguments: {names}; pass them as "
                "arguments, as it is compiled once and would not see them change"
            )
        return concrete.graph


def _is_differentiable(spec: TensorSpec) -> bool:
    dtype = tf.as_dtype(spec.dtype)
    return dtype.is_floating or dtype.is_complex


def _with_parameters(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """`fn` of any number of tensors as a function whose parameters have names."""

    def named(*tensors: tf.Tensor) -> Any:
        return fn(*tensors)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in names]
    )
    return named
