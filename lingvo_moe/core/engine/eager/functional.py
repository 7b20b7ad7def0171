"""The functional form: a piece of eager code that runs as one SPMD program over a mesh.

    ffn = shard_function(feed_forward, in_shardings=[("data", None), (None, "model"), ("model", None)],
                         out_shardings=("data", None), mesh=Mesh.parse("data:2,model:4"))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(ffn(x, wi, wo) ** 2)        # eager code around it
    gradients = tape.gradient(loss, [wi, wo])             # tf.Variables, or tensors that are watched

The function is traced, lowered and compiled once for each signature of its arguments, as the engines
do it; annotations inside it take effect. Tensors go to the devices and come back through the host's
memory, so the function should hold enough work to be worth the way.
"""

import functools
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.engine.eager.functional_op import Operation
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec, dtype_name
from lingvo_moe.core.engine.lowering.tracing import LoweringError
from lingvo_moe.core.engine.pjrt import CompiledProgram, PjrtEngine
from lingvo_moe.core.engine.program_analysis import ERROR, check_action
from lingvo_moe.core.nested_map import flatten, flatten_items, map_structure, pack_as
from lingvo_moe.core.sharding import Mesh, ShardingError, current_mesh, mesh_split

_STATIC = (bool, int, float, complex, str, bytes, type(None), tf.DType)


def shard_function(
    fn: Callable[..., Any] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    mesh: Mesh | str | None = None,
    *,
    max_programs: int = 64,
    known_faults: str = ERROR,
) -> Any:
    """`fn` as one SPMD program over the mesh's devices, called from eager code, differentiable.

    Also a decorator: `@shard_function(in_shardings=..., mesh=...)`.

    Args:
        fn: a TensorFlow function of tensors and trees of them (dicts, NestedMaps, lists, tuples,
            named tuples) that returns such a tree. tf.Variables among the arguments come as their
            values, and gradients flow to them. Python numbers, strings and None are constants: each
            value is compiled for itself. Variables that `fn` does not get as arguments cannot be used.
        in_shardings: None: all arguments are replicated. Else a list with an entry for each
            argument, or a dict by the arguments' names. An entry is None, or for a tensor its
            mapping (a mesh axis, axes or None for each dimension) or a spec with a `.split`, and for
            a tree a tree of entries.
        out_shardings: the same for the result, before it is fetched. None: replicated. AUTO: the
            partitioner chooses.
        mesh: also as text, e.g. 'data:2,model:4'; by default the one in force when the function is called.
        max_programs: how many signatures are kept; those not used for longest are dropped.
        known_faults: what to do with a program that XLA's partitioner is known to compute wrongly:
            'error', 'warn' or 'off'.
    """
    if fn is None:
        options = {name: value for name, value in locals().items() if name != "fn"}
        return functools.partial(shard_function, **options)
    if not callable(fn):
        raise ShardingError(f"shard_function: {fn!r} is no function; for a tensor there is `shard`")
    check_action(known_faults, "shard_function: known_faults")
    return ShardedFunction(fn, in_shardings, out_shardings, mesh, max_programs, known_faults)


class ShardedFunction:
    """A function over a mesh; see `shard_function`.

    Called while a program is being traced (under an engine, or inside another sharded function) it
    becomes a part of that program, with its shardings as annotations.
    """

    MAKER = "shard_function"  # for messages: what makes such functions

    def __init__(
        self,
        fn: Callable[..., Any],
        in_shardings: Any,
        out_shardings: Any,
        mesh: Mesh | str | None,
        max_programs: int,
        known_faults: str = ERROR,
    ):
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._max_programs = fn, max_programs
        self._mesh = None if mesh is None else Mesh.parse(mesh, f"{self.MAKER}: mesh")
        self._in_shardings, self._out_shardings = in_shardings, out_shardings
        self._known_faults = known_faults
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._parameters = inspect.signature(fn)
        self._programs: OrderedDict[Any, Any] = OrderedDict()  # the last one used is last

    def __get__(self, instance: Any, owner: Any) -> "ShardedFunction":
        """Refuses to become a method: `self` would be an argument, and it is no tensor."""
        if instance is None:
            return self
        raise ShardingError(
            f"{self._name}: shard_function stands on a method of {owner.__name__}; shard the bound "
            f"method of an object instead, e.g. in its __init__"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the results as eager tensors.

        Raises:
            ShardingError: a sharding that does not fit its argument, naming it; no mesh; a program that
                XLA's partitioner is known to compute wrongly, with line and remedy; inside a
                tf.function that no engine is lowering; variables or watched tensors that are not
                arguments; or what annotations inside raise.
            LoweringError: 64-bit tensors, or results that are no tensors of a static shape.
            EngineError: fewer devices than the mesh has.
        """
        arguments = self._Arguments(args, kwargs)
        if not tf.executing_eagerly():
            return self._Inline(arguments)
        bound = self._Bound(arguments)
        return bound.Pack(bound.operation(*_tensors(arguments)))

    def Program(self, *args: Any, **kwargs: Any) -> Program:
        """The lowered program for such arguments; nothing is run."""
        return self._Bound(self._Arguments(args, kwargs)).operation.program

    def Compiled(self, *args: Any, **kwargs: Any) -> CompiledProgram:
        """The compiled program for such arguments: its text, collectives and memory."""
        return self._Bound(self._Arguments(args, kwargs)).operation.compiled

    def CompiledGradient(self, *args: Any, **kwargs: Any) -> CompiledProgram:
        """The compiled program of the gradient by all floating-point arguments."""
        return self._Bound(self._Arguments(args, kwargs)).operation.Gradient().compiled

    def NumPrograms(self) -> int:
        """The number of signatures that are kept."""
        return len(self._programs)

    def Key(self, arguments: Mapping[str, Any], mesh: Mesh) -> tuple[Any, ...]:
        """A key that is the same for two calls exactly if their arguments have the same signature."""
        kinds = (_kind(path, leaf) for path, leaf in _items(arguments))
        return (mesh, *kinds, repr(map_structure(lambda _: 0, dict(arguments))))

    def Bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by the names of the function's parameters, defaults included."""
        try:
            bound = self._parameters.bind(*args, **kwargs)
        except TypeError as e:
            raise TypeError(f"{self._name}: {e}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def _Arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Binds the arguments, and checks that a program can take each leaf. Raises ShardingError for others."""
        arguments = self.Bind(args, kwargs)
        for path, leaf in _items(arguments):
            if not isinstance(leaf, (*_STATIC, tf.Tensor, tf.Variable, np.ndarray, np.generic)):
                raise ShardingError(
                    f"{self._name}: argument {path} is a {type(leaf).__name__}; arguments are dense "
                    "tensors, variables, arrays, Python numbers and strings, and trees of them"
                )
            if not isinstance(leaf, _STATIC):
                _check_numbers(self._name, f"argument {path}", leaf.dtype)
        return arguments

    def MeshInForce(self) -> Mesh:
        """The function's mesh, or the one in force. Raises ShardingError: there is neither."""
        mesh = self._mesh or current_mesh()
        if mesh is None:
            raise ShardingError(
                f"{self._name}: no mesh; give {self.MAKER} one, or call it under sharding.use_mesh(mesh)"
            )
        return mesh

    def Kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value made for a signature; those not used for longest are dropped."""
        if key not in self._programs:
            self._programs[key] = make()
        self._programs.move_to_end(key)
        while len(self._programs) > self._max_programs:
            self._programs.popitem(last=False)
        return self._programs[key]

    def _Bound(self, arguments: dict[str, Any]) -> "_Bound":
        mesh = self.MeshInForce()
        return self.Kept(self.Key(arguments, mesh), lambda: _Bound(self, arguments, mesh))

    def _Inline(self, arguments: dict[str, Any]) -> Any:
        mesh = current_mesh()
        if mesh is None:
            raise ShardingError(
                f"{self._name}: a sharded function was called inside a tf.function that no engine "
                "lowers. It is a program of its own, and called from eager code; or lower the outer "
                "function with an engine, and this one becomes a part of it"
            )
        mesh = self._mesh or mesh
        splits = self.InSplits(arguments, mesh)
        chosen = [splits[path] for path, _ in tensor_items(arguments)]
        out = self.Call(arguments, _annotated(_tensors(arguments), chosen, mesh))
        if self._out_shardings is None or self._out_shardings is AUTO:
            return out
        flat = [tf.convert_to_tensor(y) for y in flatten(out)]
        return pack_as(out, _annotated(flat, self.OutSplits(out, mesh), mesh))

    def Call(self, arguments: dict[str, Any], tensors: Sequence[tf.Tensor]) -> Any:
        """The function itself, of arguments whose tensors are replaced."""
        rest = iter(tensors)
        flat = [
            leaf if isinstance(leaf, _STATIC) else next(rest)
            for leaf in flatten(list(arguments.values()))
        ]
        values = pack_as(list(arguments.values()), flat)
        bound = inspect.BoundArguments(
            self._parameters, OrderedDict(zip(arguments, values, strict=True))
        )
        return self._fn(*bound.args, **bound.kwargs)

    def InSplits(self, arguments: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
        """The checked split of each tensor among the arguments, by its path."""
        what = f"{self._name}: in_shardings"
        names = list(arguments)
        entries = self._in_shardings
        if entries is None:
            entries = {}
        elif isinstance(entries, Mapping):
            unknown = [name for name in entries if name not in names]
            if unknown:
                raise ShardingError(
                    f"{what}: there is no argument {unknown[0]!r}{did_you_mean(unknown[0], names)}"
                )
        else:
            if not isinstance(entries, (list, tuple)) or any(isinstance(e, str) for e in entries):
                raise ShardingError(
                    f"{what}={entries!r} has to be a list with an entry for each argument "
                    f"({', '.join(names)}), or a dict by name"
                )
            if len(entries) != len(names):
                raise ShardingError(
                    f"{what}: {len(entries)} entries for {len(names)} argument(s) ({', '.join(names)})"
                )
            entries = dict(zip(names, entries))
        splits: dict[str, Any] = {}
        for name, value in arguments.items():
            splits |= _splits(what, name, value, entries.get(name), mesh)
        return splits

    def OutSplits(self, results: Any, mesh: Mesh) -> list[Any]:
        """The checked split of each result; `results` is a tree of tensors or specs."""
        what = f"{self._name}: out_shardings"
        splits = _splits(what, "result", results, self._out_shardings, mesh)
        return [splits[path] for path, _ in flatten_items(results, "result")]


class _Bound:
    """A sharded function for one signature of arguments."""

    def __init__(self, function: ShardedFunction, arguments: dict[str, Any], mesh: Mesh):
        splits = function.InSplits(arguments, mesh)
        # The cache must not keep the first call's tensors alive.
        template = {
            name: map_structure(lambda leaf: leaf if isinstance(leaf, _STATIC) else _TENSOR, value)
            for name, value in arguments.items()
        }
        names = _identifiers([path for path, _ in tensor_items(arguments)])
        specs = [
            replace(TensorSpec.Of(leaf, name), split=splits[path] or ())
            for (path, leaf), name in zip(tensor_items(arguments), names)
        ]
        name = function._name
        self._structure: Any = None

        def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
            out = function.Call(template, tensors)
            self._structure = map_structure(lambda _: 0, out)
            return [_result(name, path, y) for path, y in flatten_items(out, "result")]

        def choose(results: list[TensorSpec]) -> Any:
            wanted = function._out_shardings
            if wanted is AUTO:
                return AUTO
            return function.OutSplits(pack_as(self._structure, results), mesh)

        self.operation = Operation(name, flat, specs, _engine(mesh, function._known_faults), choose)
        if not self.operation.results:
            raise LoweringError(f"{name}: returns no tensor")

    def Pack(self, results: Sequence[tf.Tensor]) -> Any:
        """The results in the structure in which the function returns them."""
        return pack_as(self._structure, list(results))


# Stands for a tensor in a signature.
_TENSOR = object()


@functools.lru_cache(maxsize=16)
def _engine(mesh: Mesh, known_faults: str) -> PjrtEngine:
    return PjrtEngine(mesh, known_faults=known_faults)


def _items(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [item for name, value in arguments.items() for item in flatten_items(value, name)]


def tensor_items(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The tensors, variables and arrays among bound arguments, as (path, leaf)."""
    return [(path, leaf) for path, leaf in _items(arguments) if not isinstance(leaf, _STATIC)]


def _tensors(arguments: Mapping[str, Any]) -> list[tf.Tensor]:
    # A variable's value is read here, so that a tape sees it.
    return [tf.convert_to_tensor(leaf) for _, leaf in tensor_items(arguments)]


def _annotated(tensors: Sequence[tf.Tensor], splits: Sequence[Any], mesh: Mesh) -> list[tf.Tensor]:
    pairs = zip(tensors, splits, strict=True)
    return [mesh_split(x, mesh, split or (None,) * x.shape.rank) for x, split in pairs]


def _kind(path: str, leaf: Any) -> Any:
    if isinstance(leaf, _STATIC):
        # As text: 0.0 equals -0.0, and NaN not even itself.
        return path, type(leaf), repr(leaf)
    return path, tuple(leaf.shape), dtype_name(leaf.dtype)


def _result(name: str, path: str, leaf: Any) -> tf.Tensor:
    if leaf is None:
        raise LoweringError(f"{name}: {path} is None; a program's results are tensors")
    tensor = tf.convert_to_tensor(leaf)
    _check_numbers(name, path, tensor.dtype)
    return tensor


def _check_numbers(name: str, path: str, dtype: Any) -> None:
    kind = np.dtype(dtype.as_numpy_dtype if isinstance(dtype, tf.DType) else dtype)
    if kind.kind in "OSUMm":
        what = dtype.name if isinstance(dtype, tf.DType) else kind.name
        raise LoweringError(f"{name}: {path} is of dtype {what}; a program's tensors are numbers")


def _identifiers(paths: Sequence[str]) -> list[str]:
    """A parameter's name for each path: `params.w[0]` -> `params_w_0`."""
    names: list[str] = []
    for path in paths:
        name = base = re.sub(r"\W+", "_", path).strip("_") or "arg"
        while name in names:
            name += "_"
        names.append(name)
        assert base.isidentifier(), path
    return names


def _splits(what: str, path: str, value: Any, entry: Any, mesh: Mesh) -> dict[str, Any]:
    """The split of each leaf under `path`: () where it is whole."""
    if entry is None:
        return {p: () for p, _ in flatten_items(value, path)}
    if isinstance(value, Mapping) and isinstance(entry, Mapping):
        for key in entry:
            if key not in value:
                raise ShardingError(
                    f"{what}: {path} has no {key!r}{did_you_mean(str(key), map(str, value))}"
                )
        parts = [(f"{path}.{key}", value[key], entry.get(key)) for key in sorted(value)]
    elif isinstance(value, (list, tuple)) and isinstance(entry, (list, tuple)):
        if len(entry) != len(value):
            raise ShardingError(
                f"{what}: {path} is a {type(value).__name__} of {len(value)}, but has "
                f"{len(entry)} entries: {entry!r}"
            )
        parts = [(f"{path}[{i}]", v, e) for i, (v, e) in enumerate(zip(value, entry))]
    elif isinstance(value, (Mapping, list, tuple)):
        raise ShardingError(
            f"{what}: {path} is a {type(value).__name__}, so its entry is a tree like it, or None; "
            f"got {entry!r}"
        )
    else:
        return {path: _mapping(what, path, value, entry, mesh)}
    return {p: s for part in parts for p, s in _splits(what, *part, mesh).items()}


def _mapping(what: str, path: str, leaf: Any, entry: Any, mesh: Mesh) -> Any:
    if isinstance(leaf, _STATIC):
        raise ShardingError(f"{what}: {path} is {leaf!r}, no tensor; its entry has to be None")
    entry = getattr(entry, "split", entry)
    if isinstance(entry, list):
        entry = tuple(entry)
    if not isinstance(entry, tuple) or not all(_is_axis(a) for a in entry):
        raise ShardingError(
            f"{what}: {path} is a tensor of shape {list(leaf.shape)}, so its entry has a mesh axis, "
            f"a tuple of them or None for each dimension; got {entry!r}"
        )
    spec = replace(TensorSpec.Of(leaf, path), split=entry)
    if entry == () and spec.shape:
        return ()
    try:
        return spec.OnMesh(mesh).split
    except ShardingError as e:
        raise ShardingError(f"{what}: {e}") from None


def _is_axis(axis: Any) -> bool:
    if isinstance(axis, tuple):
        return all(isinstance(a, str) for a in axis)
    return axis is None or isinstance(axis, str)
