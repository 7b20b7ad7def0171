"""The search: from a traced function to its best strategy over a mesh."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.analysis.plans.network.mesh_machine import MeshMachine
from lingvo_moe.analysis.search.auto_shard import solver
from lingvo_moe.analysis.search.auto_shard.choice_costs import Costs
from lingvo_moe.analysis.search.auto_shard.exchanges import LayoutExchange
from lingvo_moe.analysis.search.auto_shard.operators import (
    ANNOTATION,
    Argument,
    Operators,
    TracedTensor,
    is_even,
)
from lingvo_moe.analysis.search.auto_shard.recording import Recording
from lingvo_moe.analysis.search.auto_shard.strategy import (
    ReadSharding,
    Strategy,
    Tensor,
    mapping_of,
)
from lingvo_moe.core.console.mistakes import noting_places
from lingvo_moe.core.console.units import size
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh, ShardingError, use_mesh
from lingvo_moe.core.sharding.annotate import free_letters, read_mapping
from lingvo_moe.core.sharding.letters import DimsMapping

_MANUAL = ("XlaSpmdFullToShardShape", "XlaSpmdShardToFullShape")


class Recorded:
    """A function's operations, recorded once under the mesh.

    Attributes:
        arguments, results: tensors.
        operations: in order.
        seconds: that the tracing took.
    """

    def __init__(
        self,
        call: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
        specs: Sequence[TensorSpec],
        mesh: Mesh,
    ):
        """Args: `call` takes as many tensors as there are specs."""
        start = time.perf_counter()

        def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
            with Recording() as recording, free_letters():
                self.results = call(tensors)
            self.operations = recording.operations
            self.arguments = list(tensors)
            return self.results

        with use_mesh(mesh), noting_places():
            # Kept, as the operations live no longer than their graph.
            self._function = tf.function(flat, autograph=False).get_concrete_function(
                *[tf.TensorSpec(s.shape, s.dtype) for s in specs]
            )
        self.seconds = time.perf_counter() - start


class StrategySearch:
    """The search for the best strategy of one traced function over a mesh.

    Attributes:
        operators: the function's operators.
        costs: the costs of their choices.
        notes: remarks on annotations that the search does not understand.
    """

    def __init__(
        self,
        name: str,
        traced: Recorded,
        arguments: Sequence[Argument],
        results: Sequence[tuple[str, DimsMapping | None]],
        on: MeshMachine,
    ):
        """`results` has the path of each result, and its sharding if it is given."""
        self._name, self._on, self._traced, self._results = name, on, traced, results
        self.notes: list[str] = []
        start = time.perf_counter()
        for op in traced.operations:
            if op.type in _MANUAL:
                raise ShardingError(
                    f"auto_shard: {name} has a manual region ({op.name}), in which the user says what each device "
                    "computes; search for the functions around it"
                )
        self.operators = Operators(
            arguments,
            traced.operations,
            on.mesh,
            self._MappingOf,
            [
                (x, path, mapping)
                for x, (path, mapping) in zip(traced.results, results, strict=True)
            ],
        )
        self.costs = Costs(self.operators, on)
        self.seconds = time.perf_counter() - start

    def Run(self, memory_limit: float | None) -> Strategy:
        """The best strategy that needs at most `memory_limit` bytes on a device; None: any.

        Raises ShardingError: there is none; the message says what lacks.
        """
        start = time.perf_counter()
        try:
            solution = solver.solve(self.costs.choices, self.costs.edges, memory_limit)
        except solver.NoSolution:
            raise ShardingError(self._Lacking(memory_limit or 0.0)) from None
        solving = time.perf_counter() - start
        sizes = {
            "operations": len(self._traced.operations),
            "operators": len(self.operators.operators),
            "choices": sum(len(c.choices) for c in self.costs.choices),
            "tracing_seconds": self._traced.seconds,
            "costs_seconds": self.seconds,
            "solving_seconds": solving,
        }
        return self.AsStrategy(solution, sizes)

    def AsStrategy(self, solution: solver.Solution, search: dict[str, Any]) -> Strategy:
        """Chosen shardings as a strategy."""
        notes = [
            *self.notes,
            *(
                f"{first}: no rule for {kind}; its tensors are replicated"
                for kind, first in sorted(self.operators.without_rule.items())
            ),
        ]
        if not solution.optimal:
            notes.append("the solver ran out of time: a better strategy may exist")
        arguments = tuple(
            Tensor(v.name, v.shape, self._AtBorder(v, solution))
            for v in self.operators.values
            if v.op == -1
        )
        operators = tuple(self._Made(solution))
        chosen = (c.choices[k] for c, k in zip(self.costs.choices, solution.chosen))
        if self._on.mesh.size > 1 and not any(
            axis is not None for choice in chosen for axis in choice
        ):
            notes.append(
                f"nothing is sharded: over mesh {self._on.mesh} no dimension divides evenly, or copies cost less"
            )
        return Strategy(
            mesh=self._on.mesh,
            machine=self._on.machine.name,
            seconds=solution.seconds,
            num_bytes=round(solution.kept + solution.working),
            arguments=arguments,
            results=tuple(self._ResultTensors(solution)),
            operators=operators,
            reads=tuple(self._Reads(solution)),
            notes=tuple(notes),
            search=search,
        )

    def _MappingOf(self, op: Any) -> DimsMapping:
        mapping = read_mapping(op, self._on.mesh)
        if mapping is None:
            self.notes.append(
                f"{op.name}: no axes of mesh {self._on.mesh} say this annotation; it is kept, and counts as replicated"
            )
            return (None,) * op.outputs[0].shape.rank
        return mapping

    def _Mapping(self, value: TracedTensor, solution: solver.Solution) -> DimsMapping:
        """The sharding in which the solution makes a tensor."""
        number = self.costs.number[value.number]
        choice = self.costs.choices[number].choices[solution.chosen[number]]
        layout = self.operators.home[value.number].holds[value]
        return mapping_of(self.costs.LayoutOf(layout, choice))

    def _AtBorder(self, value: TracedTensor, solution: solver.Solution) -> DimsMapping:
        """The sharding of an argument or a result; replicated where an annotation inside shards it unevenly."""
        mapping = self._Mapping(value, solution)
        even = is_even(value.shape, mapping, self._on.mesh)
        return mapping if even else (None,) * len(value.shape)

    def _Made(self, solution: solver.Solution) -> Iterator[Tensor]:
        """The result of each operator, and what other operators read of it."""
        crossing: dict[int, set[TracedTensor]] = defaultdict(set)
        for c in self.costs.crossings:
            crossing[c.producer].add(c.value)
        for i, operator in enumerate(self.operators.operators):
            if operator.kind == ANNOTATION:
                continue
            made = {v for v in crossing[i] if v.op >= 0}
            made |= {v for v, _ in operator.root}
            for value in sorted(made, key=lambda v: v.number):
                if value.shape and value.num_bytes:
                    op = self._traced.operations[value.op]
                    mapping = self._Mapping(value, solution)
                    yield Tensor(value.name, value.shape, mapping, value.op, value.index, op.type)

    def _Reads(self, solution: solver.Solution) -> Iterator[ReadSharding]:
        """Yields what an operation reads in another sharding than it is made in, or whose gradient is moved."""
        for c in self.costs.crossings:
            ends = [
                self.costs.choices[n].choices[solution.chosen[n]] for n in (c.producer, c.consumer)
            ]
            made = self.costs.LayoutOf(c.held, ends[0])
            used = self.costs.LayoutOf(c.used, ends[1])
            forward, backward = self.costs.ExchangesOf(c, *ends)
            if not c.value.shape or (made == used and not backward):
                continue
            path = self.operators.operators[c.consumer].name
            yield ReadSharding(
                op=c.member.op,
                name=path if c.member.op < 0 else self._traced.operations[c.member.op].name,
                type=c.member.type,
                operand=c.operand,
                shape=c.value.shape,
                mapping=mapping_of(used),
                made=mapping_of(made),
                collectives=_texts(forward),
                backward=_texts(backward),
            )

    def _ResultTensors(self, solution: solver.Solution) -> Iterator[Tensor]:
        """Yields the function's results in the shardings that the caller gave, or else that the solution has."""
        for x, (path, mapping) in zip(self._traced.results, self._results, strict=True):
            value = self.operators.ValueOf(x)
            shape = tuple(x.shape.as_list())
            if mapping is None:
                mapping = self._AtBorder(value, solution) if value else (None,) * len(shape)
            yield Tensor(path, shape, mapping)

    def _Lacking(self, limit: float) -> str:
        """Says that no strategy keeps a memory limit, how much the smallest needs, and of which operators."""
        least = solver.least_memory(self.costs.choices)
        largest = sorted(
            (
                (float(c.kept.min()), op.name)
                for c, op in zip(self.costs.choices, self.operators.operators)
            ),
            key=lambda item: (-item[0], item[1]),
        )[:3]
        parts = ", ".join(f"{name} {size(num)}" for num, name in largest if num)
        return (
            f"auto_shard: {self._name}: no strategy over mesh {self._on.mesh} keeps memory_limit={size(limit)} on a "
            f"device; every one needs at least {size(least)} (of which {parts}), {size(max(0.0, least - limit))} more. "
            "A larger mesh, a smaller batch or a larger limit would do"
        )


def _texts(steps: Sequence[LayoutExchange]) -> tuple[str, ...]:
    return tuple(f"{step.kind} over {'+'.join(step.axes)}" for step in steps)
