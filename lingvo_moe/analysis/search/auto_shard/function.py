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
    sharded = AutoSharded(fn, in_shardings, out_shardings, mesh, max_programs, known_faults)
    sharded.Configure(differentiate, topology, memory_limit, _read(strategy))
    return sharded


class AutoSharded(ShardedFunction):
    """A function that finds its sharding; see `auto_shard`."""

    MAKER = "auto_shard"

    def Configure(
        self,
        differentiate: Sequence[str] | None,
        topology: str,
        memory_limit: int | None,
        strategy: strategies.Strategy | None,
    ) -> None:
        """Sets what `auto_shard` was given for the search."""
        if isinstance(differentiate, str):
            raise ShardingError(
                f"auto_shard: differentiate={differentiate!r} has to be a list of names, e.g. [{differentiate!r}]"
            )
        for name in differentiate or ():
            names = list(self._parameters.parameters)
            if name not in names:
                raise ShardingError(
                    f"auto_shard: differentiate: {self._name} has no argument {name!r}{did_you_mean(name, names)}"
                )
        self._differentiate, self._topology = differentiate, topology
        self._memory_limit, self._given = memory_limit, strategy
        self._watched: dict[tuple[str, ...], list[bool]] = {}  # by the paths of the arguments

    def Strategy(self, *args: Any, **kwargs: Any) -> strategies.Strategy:
        """The strategy for such arguments; it is searched for if it is not known yet, and nothing is run.

        In place of a tensor a TensorSpec does.
        """
        return self._Find(self.Bind(args, kwargs))[0]

    def _Bound(self, arguments: dict[str, Any]) -> Any:
        return self._Find(arguments)[1]._Bound(arguments)

    def _Inline(self, arguments: dict[str, Any]) -> Any:
        return self._Find(arguments)[1]._Inline(arguments)

    def _Find(self, arguments: dict[str, Any]) -> tuple[strategies.Strategy, ShardedFunction]:
        mesh, wanted = self.MeshInForce(), self._Wanted(arguments)

        def find() -> tuple[strategies.Strategy, ShardedFunction]:
            strategy, structure = self._Strategy(arguments, mesh, wanted)
            return strategy, self._Annotated(arguments, strategy, structure)

        return self.Kept((self.Key(arguments, mesh), tuple(wanted)), find)

    def _Wanted(self, arguments: dict[str, Any]) -> list[bool]:
        """Whether the gradient of each tensor counts."""
        leaves = tensor_items(arguments)
        if self._differentiate is not None:
            chosen = {
                n: [path for path, _ in tensor_items({n: arguments[n]})]
                for n in self._differentiate
            }
            paths = {path for some in chosen.values() for path in some}
            return [path in paths for path, _ in leaves]
        names = tuple(path for path, _ in leaves)
        trained = [
            leaf.trainable
            if isinstance(leaf, tf.Variable)
            else isinstance(leaf, tf.Tensor) and tapes(leaf) > 0
            for _, leaf in leaves
        ]
        if any(trained):
            self._watched[names] = trained
        return self._watched.get(names, [True] * len(leaves))

    def Searched(self, *args: Any, **kwargs: Any) -> StrategySearch:
        """The search for such arguments, not yet run: its operators, their choices and costs."""
        arguments = self.Bind(args, kwargs)
        return self._Search(arguments, self.MeshInForce(), self._Wanted(arguments))[0]

    def _Strategy(
        self, arguments: dict[str, Any], mesh: Mesh, wanted: Sequence[bool]
    ) -> tuple[strategies.Strategy, Any]:
        """The strategy, and the structure of the results."""
        if self._given is not None:
            traced, specs, structure = self._Trace(arguments, mesh)
            _check(self._given, self._name, mesh, specs, traced)
            return self._given, structure
        search, structure = self._Search(arguments, mesh, wanted)
        best = search.Run(self._memory_limit)
        for note in best.notes:
            warnings.warn(f"auto_shard: {self._name}: {note}", stacklevel=6)
        return best, structure

    def _Trace(
        self, arguments: dict[str, Any], mesh: Mesh
    ) -> tuple[Recorded, list[TensorSpec], Any]:
        """The operations, the arguments' specs, and the structure of the results."""
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

        return Recorded(call, specs, mesh), specs, structure

    def _Search(
        self, arguments: dict[str, Any], mesh: Mesh, wanted: Sequence[bool]
    ) -> tuple[StrategySearch, Any]:
        traced, specs, structure = self._Trace(arguments, mesh)
        paths = [path for path, _ in flatten_items(structure, "result")]
        splits = self.InSplits(arguments, mesh)
        results = pack_as(structure, [TensorSpec.Of(y, "") for y in traced.results])
        splits_out = [()] * len(paths)
        if self._out_shardings is not None:
            splits_out = self.OutSplits(results, mesh)
        search = StrategySearch(
            self._name,
            traced,
            [
                Argument(x, spec.name, splits[spec.name] or None, gradient)
                for x, spec, gradient in zip(traced.arguments, specs, wanted, strict=True)
            ],
            [(path, split or None) for path, split in zip(paths, splits_out, strict=True)],
            mesh_machine(mesh, self._topology),
        )
        return search, structure

    def _Annotated(
        self, arguments: dict[str, Any], strategy: strategies.Strategy, structure: Any
    ) -> ShardedFunction:
        fn, name = self._fn, self._name

        @functools.wraps(fn)
        def with_annotations(*args: Any, **kwargs: Any) -> Any:
            return annotated(lambda: fn(*args, **kwargs), strategy, name)

        by_path: Mapping[str, Any] = {t.name: t.mapping for t in strategy.arguments}
        inputs = {
            n: pack_as(value, [by_path.get(path) or None for path, _ in flatten_items(value, n)])
            for n, value in arguments.items()
        }
        outputs = pack_as(structure, [t.mapping or None for t in strategy.results])
        return ShardedFunction(
            with_annotations, inputs, outputs, strategy.mesh, 1, self._known_faults
        )


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


def _check(
    strategy: strategies.Strategy,
    name: str,
    mesh: Mesh,
    specs: Sequence[TensorSpec],
    traced: Recorded,
) -> None:
    """Raises ShardingError unless the strategy is for this function."""
    what = f"{name}: the given strategy"
    if strategy.mesh != mesh:
        raise ShardingError(f"{what} is for mesh {strategy.mesh}, not {mesh}")
    want = [(t.name, t.shape) for t in strategy.arguments]
    have = [(s.name, s.shape) for s in specs]
    if want != have:
        wrong = next((h for h, w in zip(have, want) if h != w), None)
        text = f"{wrong[0]} has shape {list(wrong[1])}" if wrong else f"{len(have)} arguments"
        raise ShardingError(f"{what} is for other arguments: here {text}")
    placed: list[strategies.Tensor | strategies.ReadSharding] = [
        *strategy.operators,
        *(read for read in strategy.reads if read.op >= 0),
    ]
    for t in placed:
        op = traced.operations[t.op] if t.op < len(traced.operations) else None
        if op is None or op.type != t.type:
            here = f"{op.type} {op.name!r}" if op is not None else "missing"
            raise ShardingError(
                f"{what} is for another function: operation {t.op} was {t.type} {t.name!r}, and is {here} here"
            )
