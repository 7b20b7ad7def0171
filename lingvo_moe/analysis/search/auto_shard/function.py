"""auto_shard: a function that finds its own sharding, called from eager code.

    step = auto_shard(loss, Mesh.parse("data:2,model:4"))
    with tf.GradientTape() as tape:
        y = step(weights, batch)
    gradients = tape.gradient(y, weights)
    print(step.Strategy(weights, batch))

The function is traced and its strategy found once for each signature of its arguments; from then on it is a
`ShardedFunction` with the strategy's annotations.
"""

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from lingvo_moe.analysis.plans.network.mesh_machine import mesh_machine
from lingvo_moe.analysis.search.auto_shard import strategy as strategies
from lingvo_moe.analysis.search.auto_shard.annotating import annotated
from lingvo_moe.analysis.search.auto_shard.operators import Argument
from lingvo_moe.analysis.search.auto_shard.search import Recorded, StrategySearch
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.engine.eager.functional import ShardedFunction, tensor_items
from lingvo_moe.core.engine.lowering.specs import TensorSpec, dtype_name
from lingvo_moe.core.engine.program_analysis import ERROR, check_action
from lingvo_moe.core.nested_map import flatten, flatten_items, map_structure, pack_as
from lingvo_moe.core.private.tensorflow import tapes
from lingvo_moe.core.sharding import Mesh, ShardingError


def auto_shard(
    fn: Callable[..., Any] | None = None,
    mesh: Mesh | str | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    differentiate: Sequence[str] | None = None,
    topology: str = "",
    memory_limit: int | None = None,
    strategy: strategies.Strategy | str | os.PathLike | None = None,
    max_programs: int = 64,
    known_faults: str = ERROR,
) -> Any:
    """`fn` as one SPMD program over the mesh's devices, whose sharding is searched for; differentiable.

    Also a decorator. Annotations inside `fn` are kept, and so are `in_shardings` and `out_shardings`; the search
    decides about everything else.

    Args:
        fn: as `shard_function` takes it.
        mesh: by default the one in force when the function is called.
        in_shardings: as `shard_function` takes them; an entry of None leaves the argument to the search.
        out_shardings: the same for results.
        differentiate: the arguments whose gradients count, by name. None: the trainable tf.Variables, and the tensors
            that a tape watches at the call; where there are none, what a tape watched at the last call that had one,
            else all of floating-point numbers.
        topology: the machine that the strategy is for, as `tools.plan` names it, e.g. 'v5e:2x4' or 'h100:1x8'; 'cpu'
            for virtual devices of this machine, '' for an accelerator, in round figures both.
        memory_limit: bytes on a device that the strategy may use, by the search's estimate: arguments, their gradients,
            what the gradient keeps, and what one operator has at work. None: any.
        strategy: one that was found before, its text, or a file of it: nothing is searched for.
        max_programs, known_faults: as `shard_function` takes them.

    Returns:
        An AutoSharded.

    Raises:
        ShardingError: `fn` is no function, or `strategy` no strategy.
        PlanError: no such machine. It is raised by the first call, as is a machine with fewer devices than the mesh.
    """
    if fn is None:
        options = {name: value for name, value in locals().items() if name != "fn"}
        return functools.partial(auto_shard, **options)
    if not callable(fn):
        raise ShardingError(f"auto_shard: {fn!r} is no function")
    check_action(known_faults, "auto_shard: known_faults")
    if memory_limit is not None and memory_limit <= 0:
        raise ShardingError(
            f"auto_shard: memory_limit={memory_limit} has to be a number of bytes above 0"
        )
    for_search = _StrategyOptions(differentiate, topology, memory_limit, _read(strategy))
    return AutoSharded(
        fn,
        for_search,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        mesh=mesh,
        max_programs=max_programs,
        known_faults=known_faults,
    )


@dataclass(frozen=True)
class _StrategyOptions:
    """The arguments of `auto_shard` that are for the search."""

    differentiate: Sequence[str] | None
    topology: str
    memory_limit: int | None
    strategy: strategies.Strategy | None  # one that was found before; None to search


@dataclass(frozen=True)
class _TracedFunction:
    """A function as it is traced for one signature of its arguments."""

    recorded: Recorded  # its operations
    arguments: Sequence[
        TensorSpec
    ]  # a spec for each tensor of the arguments, with its path as name
    results: Any  # the structure that it returns, with a spec for each tensor


@dataclass(frozen=True)
class _AnnotatedFunction:
    """A function with the annotations of the strategy for one signature of its arguments."""

    strategy: strategies.Strategy
    function: ShardedFunction


class AutoSharded(ShardedFunction):
    """A function that finds its sharding; see `auto_shard`.

    For each signature of arguments it keeps a ShardedFunction that has the annotations of the best strategy, and does
    what that one does: runs its program, or becomes part of the program that is being traced.
    """

    MAKER = "auto_shard"

    def __init__(self, fn: Callable[..., Any], options: _StrategyOptions, **sharding: Any):
        """`sharding` are the further arguments of ShardedFunction."""
        super().__init__(fn, **sharding)
        if isinstance(options.differentiate, str):
            raise ShardingError(
                f"auto_shard: differentiate={options.differentiate!r} has to be a list of names, e.g. "
                f"[{options.differentiate!r}]"
            )
        names = list(self._parameters.parameters)
        for name in options.differentiate or ():
            if name not in names:
                raise ShardingError(
                    f"auto_shard: differentiate: {self._name} has no argument {name!r}{did_you_mean(name, names)}"
                )
        self._options = options
        # Whether a tape watched each tensor of the arguments, at the last call with one; by the paths of all of them.
        self._watched: dict[tuple[str, ...], list[bool]] = {}

    def Strategy(self, *args: Any, **kwargs: Any) -> strategies.Strategy:
        """The strategy for such arguments; it is searched for if it is not known yet, and nothing is run.

        In place of a tensor a TensorSpec does.
        """
        return self._WithAnnotations(self.Bind(args, kwargs)).strategy

    def Searched(self, *args: Any, **kwargs: Any) -> StrategySearch:
        """The search for such arguments, not yet run: its operators, their choices and costs."""
        arguments, mesh = self.Bind(args, kwargs), self.MeshInForce()
        traced = self._Trace(arguments, mesh)
        return self._Search(traced, arguments, mesh, self._Differentiated(arguments))

    def _Bound(self, arguments: dict[str, Any]) -> Any:
        return self._WithAnnotations(arguments).function._Bound(arguments)

    def _Inline(self, arguments: dict[str, Any]) -> Any:
        return self._WithAnnotations(arguments).function._Inline(arguments)

    def _WithAnnotations(self, arguments: dict[str, Any]) -> _AnnotatedFunction:
        """The function with the best strategy for arguments of these shapes and types, which is found once."""
        mesh, differentiated = self.MeshInForce(), self._Differentiated(arguments)

        def make() -> _AnnotatedFunction:
            traced = self._Trace(arguments, mesh)
            strategy = self._options.strategy
            if strategy is None:
                search = self._Search(traced, arguments, mesh, differentiated)
                strategy = search.Run(self._options.memory_limit)
                for note in strategy.notes:
                    warnings.warn(f"auto_shard: {self._name}: {note}", stacklevel=5)
            else:
                _check(strategy, self._name, mesh, traced)
            return self._Annotated(arguments, strategy, traced.results)

        return self.Kept((self.Key(arguments, mesh), tuple(differentiated)), make)

    def _Differentiated(self, arguments: dict[str, Any]) -> list[bool]:
        """Whether the gradient by each tensor of the arguments counts."""
        leaves = tensor_items(arguments)
        if (names := self._options.differentiate) is not None:
            paths = {path for path, _ in tensor_items({name: arguments[name] for name in names})}
            return [path in paths for path, _ in leaves]
        signature = tuple(path for path, _ in leaves)
        watched = [
            leaf.trainable
            if isinstance(leaf, tf.Variable)
            else isinstance(leaf, tf.Tensor) and tapes(leaf) > 0
            for _, leaf in leaves
        ]
        if any(watched):
            self._watched[signature] = watched
        return self._watched.get(signature, [True] * len(leaves))

    def _Trace(self, arguments: dict[str, Any], mesh: Mesh) -> _TracedFunction:
        specs = [
            TensorSpec(tuple(int(n) for n in leaf.shape), dtype_name(leaf.dtype), (), path)
            for path, leaf in tensor_items(arguments)
        ]
        structure: Any = None

        def call(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            nonlocal structure
            out = self.Call(arguments, tensors)
            structure = map_structure(lambda _: 0, out)
            return [tf.convert_to_tensor(y) for y in flatten(out)]

        recorded = Recorded(call, specs, mesh)
        results = pack_as(structure, [TensorSpec.Of(y, "") for y in recorded.results])
        return _TracedFunction(recorded, specs, results)

    def _Search(
        self,
        traced: _TracedFunction,
        arguments: dict[str, Any],
        mesh: Mesh,
        differentiated: Sequence[bool],
    ) -> StrategySearch:
        """The search for all shardings that neither in_shardings nor out_shardings fix."""
        in_splits = self.InSplits(arguments, mesh)
        tensors = zip(traced.recorded.arguments, traced.arguments, differentiated, strict=True)
        inputs = [
            Argument(tensor, spec.name, in_splits[spec.name] or None, gradient)
            for tensor, spec, gradient in tensors
        ]
        paths = [path for path, _ in flatten_items(traced.results, "result")]
        out_splits = self.OutSplits(traced.results, mesh)
        outputs = [(path, split or None) for path, split in zip(paths, out_splits, strict=True)]
        machine = mesh_machine(mesh, self._options.topology)
        return StrategySearch(self._name, traced.recorded, inputs, outputs, machine)

    def _Annotated(
        self, arguments: dict[str, Any], strategy: strategies.Strategy, results: Any
    ) -> _AnnotatedFunction:
        """The function with a strategy's annotations; `results` is the structure that it returns."""
        fn, name = self._fn, self._name

        @functools.wraps(fn)
        def with_annotations(*args: Any, **kwargs: Any) -> Any:
            return annotated(lambda: fn(*args, **kwargs), strategy, name)

        by_path: Mapping[str, Any] = {t.name: t.mapping for t in strategy.arguments}
        inputs = {
            n: pack_as(value, [by_path.get(path) or None for path, _ in flatten_items(value, n)])
            for n, value in arguments.items()
        }
        outputs = pack_as(results, [t.mapping or None for t in strategy.results])
        function = ShardedFunction(
            with_annotations, inputs, outputs, strategy.mesh, 1, self._known_faults
        )
        return _AnnotatedFunction(strategy, function)


def _read(strategy: strategies.Strategy | str | os.PathLike | None) -> strategies.Strategy | None:
    if strategy is None or isinstance(strategy, strategies.Strategy):
        return strategy
    if isinstance(strategy, str) and strategy.lstrip().startswith("{"):
        return strategies.Strategy.FromText(strategy)
    try:
        text = Path(strategy).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise ShardingError(f"auto_shard: strategy={strategy!r}: {why}") from None
    return strategies.Strategy.FromText(text, f"auto_shard: strategy={strategy!r}")


def _check(strategy: strategies.Strategy, name: str, mesh: Mesh, traced: _TracedFunction) -> None:
    """Raises ShardingError unless the strategy is for this function."""
    what = f"{name}: the given strategy"
    if strategy.mesh != mesh:
        raise ShardingError(f"{what} is for mesh {strategy.mesh}, not {mesh}")
    want = [(t.name, t.shape) for t in strategy.arguments]
    have = [(s.name, s.shape) for s in traced.arguments]
    if want != have:
        wrong = next((h for h, w in zip(have, want) if h != w), None)
        text = f"{wrong[0]} has shape {list(wrong[1])}" if wrong else f"{len(have)} arguments"
        raise ShardingError(f"{what} is for other arguments: here {text}")
    operations = traced.recorded.operations
    placed: list[strategies.Tensor | strategies.ReadSharding] = [
        *strategy.operators,
        *(read for read in strategy.reads if read.op >= 0),
    ]
    for t in placed:
        op = operations[t.op] if t.op < len(operations) else None
        if op is None or op.type != t.type:
            here = f"{op.type} {op.name!r}" if op is not None else "missing"
            raise ShardingError(
                f"{what} is for another function: operation {t.op} was {t.type} {t.name!r}, and is {here} here"
            )
