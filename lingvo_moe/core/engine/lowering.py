"""Lowering: from a TensorFlow function of trees of tensors, annotated, to a platform-neutral Program.

The function is traced once, under the mesh, on abstract arguments: no device is needed and nothing
is allocated.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import tensorflow as tf
from jax import export
from jax.experimental import jax2tf

from lingvo_moe.core.engine.program import Program
from lingvo_moe.core.engine.specs import (
    TensorSpec,
    dtype_name,
    first_difference,
    flatten_items,
    numpy_dtype,
    pack,
    skeleton,
)
from lingvo_moe.core.sharding import DimsMapping, Mesh, ShardingError, use_mesh


class LoweringError(ValueError):
    """A function that cannot be lowered to a program."""


class Auto:
    """For `results`: the partitioner chooses how results are cut."""


AUTO = Auto()


def lower(
    fn: Callable[..., Any],
    arg_specs: Sequence[Any],
    mesh: Mesh,
    *,
    results: Any = None,
    donate: Sequence[int] = (),
    name: str = "",
) -> Program:
    """Lowers `fn(*trees)` for a mesh.

    Args:
        fn: a TensorFlow function of trees of tensors (NestedMaps, lists) that returns such a tree
            or a tuple of them.
        arg_specs: for each argument a tree of TensorSpecs or VariableSpecs.
        mesh: is in force while `fn` is traced; its devices are numbered in order.
        results: how results are cut. None: a result whose argument of the same number is donated as
            that argument, all others whole on every device. AUTO: as the partitioner likes. Else a
            tree of specs in the structure of the results.
        donate: numbers of arguments, e.g. (0,) for the state, whose memory the results take over.
            Result i then has to have the structure, shapes and dtypes of argument i.
        name: of the program; by default the function's.

    Raises:
        LoweringError: 64-bit tensors; a result that is None or that does not fit a donated argument
            or `results`.
        ShardingError: a spec or an annotation that does not fit the mesh.
    """
    name = name or getattr(fn, "__name__", type(fn).__name__)
    if mesh.device_ids and mesh.device_ids != tuple(range(mesh.size)):
        raise ShardingError(
            f"{name}: a program numbers its devices in order, but mesh {mesh} has device_ids "
            f"{mesh.device_ids}; give the engine its devices in that order instead"
        )
    names = _arg_names(fn, len(arg_specs))
    args = [
        TensorSpec.Of(spec, path).OnMesh(mesh)
        for arg_name, tree in zip(names, arg_specs)
        for path, spec in flatten_items(tree, arg_name)
    ]
    _check_dtypes(name, args)
    flat_fn = _FlatFunction(fn, arg_specs, args, mesh)
    tf_function = tf.function(flat_fn, jit_compile=True, autograph=False)
    tf_function.get_concrete_function(*[tf.TensorSpec(a.shape, a.dtype) for a in args])
    result_specs = _result_specs(name, flat_fn, names, args, results, donate, mesh)
    abstract = jax.sharding.AbstractMesh(mesh.shape, mesh.axis_names)
    jitted = jax.jit(
        jax2tf.call_tf(tf_function, has_side_effects=False),
        out_shardings=tuple(named_sharding(abstract, s.split) for s in result_specs),
    )
    exported = export.export(
        jitted, platforms=["cpu"], disabled_checks=[export.DisabledSafetyCheck.platform()]
    )(
        *[
            jax.ShapeDtypeStruct(
                a.shape, numpy_dtype(a.dtype), sharding=named_sharding(abstract, a.split)
            )
            for a in args
        ]
    )
    return Program(
        name=name,
        mesh=mesh,
        args=tuple(args),
        results=tuple(result_specs),
        arg_structure={"names": names, "trees": [skeleton(tree) for tree in arg_specs]},
        result_structure={"tuple": flat_fn.is_tuple, "tree": flat_fn.structure},
        donated=tuple(i for i, a in enumerate(args) if _root(a.name, names) in donate),
        exported=bytes(exported.serialize()),
    )


def named_sharding(mesh: Any, split: DimsMapping | None) -> Any:
    """JAX's sharding for a split; None stays None."""
    if split is None:
        return None
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*split))


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
        self.items: list[tuple[str, Any]] = []

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
        self.items = [
            (path, TensorSpec(_static_shape(path, t), t.dtype.name))
            for (path, _), t in zip(items, tensors)
        ]
        return tuple(tensors)


def _static_shape(path: str, tensor: tf.Tensor) -> tuple[int, ...]:
    if not tensor.shape.is_fully_defined():
        raise LoweringError(f"{path} has shape {tensor.shape}; a program's shapes are static")
    return tuple(tensor.shape.as_list())


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
    name: str,
    flat_fn: _FlatFunction,
    names: list[str],
    args: list[TensorSpec],
    results: Any,
    donate: Sequence[int],
    mesh: Mesh,
) -> list[TensorSpec]:
    specs = [TensorSpec.Of(spec, path) for path, spec in flat_fn.items]
    _check_dtypes(name, specs)
    splits: dict[str, DimsMapping | None] = {}
    if results is AUTO:
        splits = {spec.name: None for spec in specs}
    elif results is not None:
        wanted = [TensorSpec.Of(s, path) for path, s in flatten_items(results, "result")]
        splits = _match(name, "results", wanted, specs)
    for number in donate:
        arg = [a for a in args if _root(a.name, names) == number]
        prefix = f"result[{number}]" if flat_fn.is_tuple else "result"
        wanted = [
            TensorSpec(a.shape, a.dtype, a.split, prefix + a.name[len(names[number]) :])
            for a in arg
        ]
        found = [s for s in specs if re.match(re.escape(prefix) + r"($|[.\[])", s.name)]
        splits.update(_match(name, f"donated argument {names[number]!r}", wanted, found))
    return [
        TensorSpec(s.shape, s.dtype, splits.get(s.name, ()), s.name).OnMesh(mesh) for s in specs
    ]


def _match(
    name: str, what: str, wanted: list[TensorSpec], found: list[TensorSpec]
) -> dict[str, DimsMapping | None]:
    """The splits of `wanted` by name, once it is sure that `found` has the same names, shapes and dtypes."""
    if [s.name for s in wanted] != [s.name for s in found]:
        difference = first_difference([s.name for s in wanted], [s.name for s in found])
        raise LoweringError(f"{name}: the results do not fit {what}: {difference}")
    for want, have in zip(wanted, found):
        if (want.shape, dtype_name(want.dtype)) != (have.shape, have.dtype):
            raise LoweringError(
                f"{name}: {have.name} is {have.dtype}{list(have.shape)}, but {what} has "
                f"{want.dtype}{list(want.shape)} there"
            )
    return {s.name: s.split for s in wanted}
