"""Explains a program: the sharding of every tensor, the collectives, and the source lines that caused them.

    explanation = explain(lower(step, specs, mesh))
    print(explanation)
    print(explanation.Sharding("ffn/einsum"))

The program is compiled for the devices of this process, or ahead of time for a TPU slice or a GPU
cluster, and not run. The explanation describes what XLA's sharding propagation and its SPMD partitioner did.
Operations that the partitioner is known to compute wrongly come first; `explanation.Check()` raises for them.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_moe.analysis.programs.hlo.collective_list import count_collectives
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.partitioner import known_faults, spmd
from lingvo_moe.analysis.programs.partitioner.explanation import (
    CodeLine,
    Exchange,
    Explanation,
    ShardedTensor,
    WrongNumbers,
)
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.specs import AUTO
from lingvo_moe.core.sharding import Mesh, current_mesh

_ARGUMENT = re.compile(r"args\[(\d+)\]")
_MOST_IN_SCOPE = 10_000


class ExplainError(ValueError):
    """A program or a name that cannot be explained."""


def explain(
    program: Program | Callable[..., Any],
    arg_specs: Sequence[Any] | None = None,
    mesh: Mesh | str | None = None,
    *,
    topology: str = "",
) -> Explanation:
    """Explains what the partitioner does with a program.

    Args:
        program: a lowered program, or a TensorFlow function of trees of tensors, which is lowered
            here; the partitioner chooses the shardings of its results.
        arg_specs: for a function: for each argument a tree of TensorSpecs or VariableSpecs.
        mesh: for a function; by default the one in force.
        topology: a TPU slice or GPU cluster to compile for ahead of time, e.g. 'v3:2x2'; '' for this process's
            devices.

    Raises:
        ExplainError: a function without specs or mesh, a program with them, or a mesh of one device.
        EngineError: too few devices, no such slice, or a program that XLA refuses.
        LoweringError, ShardingError: as `lowering.lower`.
    """
    if isinstance(program, Program):
        if arg_specs is not None or mesh is not None:
            raise ExplainError("explain: arg_specs and mesh are for a function, not for a program")
    elif not callable(program):
        raise ExplainError(f"explain: {program!r} is neither a program nor a function")
    else:
        program = _lowered(program, arg_specs, mesh)
    if program.mesh.size == 1:
        raise ExplainError(
            f"explain: program {program.name!r} is for one device, mesh {program.mesh}: nothing is "
            f"sharded and nothing sent"
        )
    from lingvo_moe.analysis.programs.aot.partitioning import partition  # the door to JAX

    made = partition(program, topology=topology)
    module = parse_module(made.before)
    propagated, partitioned = spmd.Propagated(module), parse_module(made.after)
    names = _Names(program, propagated)
    # Of a machine that is not here too, as `tools.plan` does.
    faults = known_faults.known_faults(module)
    annotations = propagated.Annotations()
    return Explanation(
        name=program.name,
        mesh=program.mesh,
        tensors=[names.Tensor(a.tensor, names.Annotated(a)) for a in annotations],
        exchanges=[names.Exchange(c) for c in spmd.communications(propagated, partitioned)],
        compiled=count_collectives(made.final),
        wrong=[WrongNumbers(fault, names.Line(fault.op)) for fault in faults],
        find=names.Find,
    )


def get_sharding(program: Program | Explanation, tensor_name: str) -> list[ShardedTensor]:
    """Returns the sharding of a tensor of a program after propagation: `Explanation.Sharding`.

    It compiles the program; for several tensors, explain the program once and use the explanation.

    Raises:
        As `explain`; ExplainError: no tensor has this name.
    """
    explanation = program if isinstance(program, Explanation) else explain(program)
    return explanation.Sharding(tensor_name)


def _lowered(
    fn: Callable[..., Any], arg_specs: Sequence[Any] | None, mesh: Mesh | str | None
) -> Program:
    mesh = mesh or current_mesh()
    if arg_specs is None or mesh is None:
        missing = "arg_specs" if arg_specs is None else "a mesh"
        raise ExplainError(
            f"explain: {getattr(fn, '__name__', fn)} is a function, and it takes {missing} to lower it"
        )
    if not isinstance(arg_specs, (list, tuple)):
        raise ExplainError(
            f"explain: arg_specs is a list with a tree of specs for each argument; got {arg_specs!r}"
        )
    from lingvo_moe.core.engine.lowering.lowering import lower  # the door to TensorFlow

    return lower(fn, arg_specs, Mesh.parse(mesh, "explain: mesh"), results=AUTO)


class _Names:
    """Maps the compiler's names to the user's, and back."""

    def __init__(self, program: Program, propagated: spmd.Propagated):
        self._program, self._propagated = program, propagated
        self._sources = program.sources
        self._arguments = [spec.name for spec in program.signature.args]
        self._annotated = {a.tensor.op: a.of for a in propagated.Annotations()}

    def Of(self, op: str) -> str:
        """The name of an operation; for an argument its path."""
        match = _ARGUMENT.fullmatch(op)
        return self._arguments[int(match[1])] if match else op

    def Line(self, op: str) -> CodeLine | None:
        """The source line of an operation; None if unknown."""
        line = self._sources.Line(op) if self._sources is not None and op else None
        return CodeLine(str(line), line.text) if line else None

    def Annotated(self, annotation: spmd.Annotation) -> str:
        """The operation or argument that an annotation annotates."""
        return self._made(annotation.tensor.op)

    def _made(self, op: str) -> str:
        """The operation or argument behind an annotation, or a chain of them; '' for another operation."""
        read = self._sources.Annotated(op) if self._sources is not None else ""
        read = read or self.Of(self._annotated.get(op, ""))
        return (self._made(read) or self._argument(read) or read) if read else ""

    def Tensor(self, tensor: spmd.PropagatedTensor, annotates: str = "") -> ShardedTensor:
        return ShardedTensor(
            name=self.Of(tensor.op),
            dtype=tensor.dtype,
            shape=tensor.shape,
            sharding=tensor.sharding,
            mesh=self._program.mesh,
            phase=tensor.phase,
            in_loop=tensor.in_loop,
            annotates=annotates,
            line=self.Line(tensor.op),
        )

    def Exchange(self, what: spmd.Communication) -> Exchange:
        op_line = self.Line(what.op)
        line = self.Line(what.asked_by) or self.Line(what.annotated_by) or op_line
        return Exchange(what, self._moved(what), line, op_line)

    def _moved(self, what: spmd.Communication) -> str:
        """The name of the moved tensor: of its producer rather than of its annotation."""
        name = what.moved or what.op
        forward = self._sources.Forward(name) if self._sources is not None else ""
        if forward and self._made(forward):
            return f"gradient of {self._made(forward)}"
        return self._made(name) or self.Of(name)

    def Find(self, name: str) -> list[ShardedTensor]:
        """See `Explanation.Sharding`."""
        wanted, _, number = name.strip().partition(":")
        candidates = [wanted]
        if self._sources is not None:
            candidates = self._sources.Same(wanted)
        for candidate in candidates:
            tensors = self._tensors_named(candidate)
            if tensors:
                return self._numbered(name, tensors, number)
        tensors = self._in_scope(wanted.replace(".", "/").strip("/"))
        if tensors:
            return tensors
        raise ExplainError(self._unknown(wanted))

    def _tensors_named(self, name: str) -> list[ShardedTensor]:
        """The tensors of the argument, or of the operation, that has this very name; [] if neither has."""
        argument = self._argument(name)
        op = f"args[{self._arguments.index(argument)}]" if argument else name
        return [self.Tensor(t) for t in self._propagated.Tensors(op)]

    def _argument(self, name: str) -> str:
        """The path of the argument of this name, given as path or as TensorFlow's name; '' if there is none."""
        for path in self._arguments:
            if name in (path, re.sub(r"[^A-Za-z0-9.]", "_", path)):
                return path
        return ""

    def _numbered(
        self, name: str, tensors: list[ShardedTensor], number: str
    ) -> list[ShardedTensor]:
        if not number or number == "0":
            return tensors
        if not number.isdecimal() or int(number) >= len(tensors):
            raise ExplainError(
                f"get_sharding: {name!r}: {tensors[0].name} has {len(tensors)} tensors"
            )
        return [tensors[int(number)]]

    def _in_scope(self, scope: str) -> list[ShardedTensor]:
        """All tensors of a scope, or of operations whose name ends with it."""
        operations = self._propagated.by_operation
        within = [op for op in operations if op.startswith(f"{scope}/") or op == scope]
        within = within or [op for op in operations if f"/{op}/".endswith(f"/{scope}/")]
        within = within or [op for op in operations if f"/{scope}/" in f"/{op}"]
        return [
            self.Tensor(t) for op in within[:_MOST_IN_SCOPE] for t in self._propagated.Tensors(op)
        ]

    def _unknown(self, name: str) -> str:
        names = {self.Of(op) for op in self._propagated.by_operation}
        names |= {"/".join(op.split("/")[:n]) for op in names for n in range(1, op.count("/") + 1)}
        if self._sources is not None:
            passed_on = ((n, self._sources.Same(n)) for n in self._sources.names())
            names |= {n for n, same in passed_on if len(same) > 1 and same[-1] in names}
        text = f"get_sharding: program {self._program.name!r} has no tensor {name!r}"
        if self._sources is not None and name in self._sources:
            text += "; it was written, but the compiler has made it part of something else"
        return text + did_you_mean(name, names)
