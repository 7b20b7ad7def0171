"""Tracing: a TensorFlow function of trees of tensors, annotated, as a function of flat tensors with a Signature.

The function is traced once, under the mesh, on abstract arguments: no device is needed and nothing
is allocated. Free of JAX.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.console.collection import paused_collection
from lingvo_moe.core.console.mistakes import noting_places
from lingvo_moe.core.engine.lowering.signature import Signature
from lingvo_moe.core.engine.lowering.sources import remembering_forward
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.kernels.pallas import tpu
from lingvo_moe.core.nested_map import first_difference, flatten_items, pack, skeleton
from lingvo_moe.core.sharding import Mesh, use_mesh
from lingvo_moe.core.sharding.manual_check import check_regions
from lingvo_moe.core.task.step import Step


class LoweringError(ValueError):
    """A function that cannot be lowered to a program."""


@dataclass(frozen=True)
class Traced:
    """A function of flat tensors that has been traced."""

    function: Any  # a `tf.function`
    graph: tf.Graph
    signature: Signature


def trace(step: Step, mesh: Mesh, jit_compile: bool = True, fused: bool = False) -> Traced:
    """Traces a step under a mesh.

    Raises as `lowering.lower_step`, whose `fused` it takes; `jit_compile` is that of `tf.function`.
    """
    fn, arg_specs = step.fn, step.arg_specs
    name = step.name or getattr(fn, "__name__", type(fn).__name__)
    names = _arg_names(fn, len(arg_specs))
    args = [
        TensorSpec.Of(spec, path).OnMesh(mesh)
        for arg_name, tree in zip(names, arg_specs)
        for path, spec in flatten_items(tree, arg_name)
    ]
    _check_dtypes(name, args)
    flat_fn = _FlatFunction(fn, arg_specs, args, mesh)
    tf_function = tf.function(flat_fn, jit_compile=jit_compile, autograph=False)
    chosen = kernels.using(tpu if fused else xla if jit_compile else tensorflow)
    with paused_collection(), remembering_forward(), chosen, noting_places():
        concrete = tf_function.get_concrete_function(
            *[tf.TensorSpec(a.shape, a.dtype) for a in args]
        )
    check_regions(concrete.graph, name, len(args), [spec.name for spec in flat_fn.results])
    results = _result_specs(replace(step, name=name), flat_fn, names, args)
    signature = Signature(
        name=name,
        mesh=mesh,
        args=tuple(args),
        results=tuple(spec.OnMesh(mesh) for spec in results),
        arg_structure={"names": names, "trees": [skeleton(tree) for tree in arg_specs]},
        result_structure={"tuple": flat_fn.is_tuple, "tree": flat_fn.structure},
        donated=tuple(i for i, a in enumerate(args) if _root(a.name, names) in step.donate),
    )
    return Traced(tf_function, concrete.graph, signature)


class _FlatFunction:
    """`fn` as a function of flat tensors, traced under the mesh; remembers the structure of its results."""

    def __init__(
        self, fn: Callable[..., Any], trees: Sequence[Any], args: list[TensorSpec], mesh: Mesh
    ):
        self._fn, self._mesh = fn, mesh
        self._skeletons = [skeleton(tree) for tree in trees]
        self._counts = [len(flatten_items(tree)) for tree in trees]
        self._names = [re.sub(r"[^A-Za-z0-9.]", "_", a.name) for a in args]
        self.is_tuple = False
        self.structure: Any = None
        self.results: list[TensorSpec] = []

    def __call__(self, *flat: tf.Tensor) -> tuple[tf.Tensor, ...]:
        # Named, so that an error about an annotation names the argument.
        flat = tuple(tf.identity(x, n) for x, n in zip(flat, self._names, strict=True))
        rest, trees = list(flat), []
        for structure, count in zip(self._skeletons, self._counts):
            trees.append(pack(structure, rest[:count]))
            rest = rest[count:]
        with use_mesh(self._mesh):
            out = self._fn(*trees)
        self.is_tuple = isinstance(out, tuple) and not hasattr(out, "_fields")
        self.structure = skeleton(out)
        items = flatten_items(out, "result")
        for path, leaf in items:
            if leaf is None:
                raise LoweringError(f"{path} is None; a program's results are tensors")
        tensors = [tf.convert_to_tensor(leaf) for _, leaf in items]
        self.results = [spec_of(path, t) for (path, _), t in zip(items, tensors)]
        return tuple(tensors)


def spec_of(path: str, tensor: tf.Tensor) -> TensorSpec:
    """The spec of a result. Raises LoweringError: it has no static shape."""
    if not tensor.shape.is_fully_defined():
        raise LoweringError(f"{path} has shape {tensor.shape}; a program's shapes are static")
    return TensorSpec.Of(tensor, path)


def _arg_names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of fn's parameters where it has enough named ones, else arg0, arg1, ..."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    named = [p.name for p in parameters if p.kind in kinds]
    return named[:count] if len(named) >= count else [f"arg{i}" for i in range(count)]


def _root(path: str, names: list[str]) -> int:
    return names.index(re.split(r"[.\[]", path)[0])


def _check_dtypes(name: str, specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        if spec.dtype in ("int64", "uint64", "float64", "complex128"):
            raise LoweringError(
                f"{name}: {spec.name} is {spec.dtype}; programs have no 64-bit arguments or results,"
                f" cast it to {spec.dtype.replace('64', '32').replace('128', '64')}"
            )


def _result_specs(
    step: Step, flat_fn: _FlatFunction, names: list[str], args: list[TensorSpec]
) -> list[TensorSpec]:
    """The specs of the flat results, with the shardings that the step asks for."""
    name, results, specs = step.name, step.results, flat_fn.results
    _check_dtypes(name, specs)
    placed: dict[str, TensorSpec] = {}
    if results is AUTO:
        placed = {spec.name: replace(spec, split=None) for spec in specs}
    elif results is not None:
        wanted = [TensorSpec.Of(s, path) for path, s in flatten_items(results, "result")]
        placed = _match(name, "results", wanted, specs)
    for number in step.donate:
        arg = [a for a in args if _root(a.name, names) == number]
        prefix = f"result[{number}]" if flat_fn.is_tuple else "result"
        wanted = [replace(a, name=prefix + a.name[len(names[number]) :]) for a in arg]
        of_argument = [s for s in specs if re.match(re.escape(prefix) + r"($|[.\[])", s.name)]
        placed.update(_match(name, f"donated argument {names[number]!r}", wanted, of_argument))
    return [placed.get(s.name, replace(s, split=())) for s in specs]


def _match(
    name: str, what: str, wanted: list[TensorSpec], results: list[TensorSpec]
) -> dict[str, TensorSpec]:
    """The specs of `wanted` by name, once it is sure that `results` has the same names, shapes and dtypes."""
    if [s.name for s in wanted] != [s.name for s in results]:
        difference = first_difference([s.name for s in wanted], [s.name for s in results])
        raise LoweringError(f"{name}: the results do not fit {what}: {difference}")
    for want, have in zip(wanted, results):
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            raise LoweringError(
                f"{name}: {have.name} is {have.dtype}{list(have.shape)}, but {what} has "
                f"{want.dtype}{list(want.shape)} there"
            )
    return {s.name: s for s in wanted}
