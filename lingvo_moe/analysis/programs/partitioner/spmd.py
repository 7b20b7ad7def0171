"""Finds the cause of each collective by comparing the modules before and after the SPMD partitioner.

Before partitioning, every instruction has its global shape and the sharding that propagation chose.
After it there are collectives; each has the op_name of the instruction that the partitioner inserted it
for. This file matches the two modules by these names and by data dependencies.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

from lingvo_moe.analysis.programs.hlo import parts
from lingvo_moe.analysis.programs.hlo.collectives import collective_use
from lingvo_moe.analysis.programs.hlo.groups import num_devices
from lingvo_moe.analysis.programs.hlo.instructions import Instruction
from lingvo_moe.analysis.programs.hlo.module import Executed, Module
from lingvo_moe.analysis.programs.hlo.sharding import REPLICATED, TensorSharding, parse_sharding
from lingvo_moe.analysis.programs.partitioner.sharding_rules import (
    product_sharding,
    transposed_back,
)

# Why there is communication.
RESHARD = "reshard"
PARTIAL = "partial results"
HALO = "halo"
RESULT = "result"
REASONS = {
    RESHARD: "an operation needs a tensor sharded differently",
    PARTIAL: "each device has a part of every sum (or maximum, ...)",
    HALO: "a device needs elements beyond the border of its shard",
    RESULT: "the program's results are brought into the requested sharding",
}

_ANNOTATION = re.compile(r"(?:^|/)XlaSharding(?:_\d+)?$")
_BORDER = re.compile(r"(?:^|/)(?:call_exported|XLA_Retvals)$")
_REDUCING = ("dot", "convolution", "reduce", "scatter", "select-and-scatter", "reduce-window")
_REACHING = (
    *("convolution", "reduce-window", "select-and-scatter", "pad", "slice", "concatenate"),
    *("reverse", "reshape", "dynamic-slice", "dynamic-update-slice", "gather"),
)
# Opcodes that only move, rename or mask their operand; the search for a collective's source skips them.
_MOVING = frozenset(
    [
        *("reshape", "transpose", "copy", "bitcast", "slice", "pad", "dynamic-slice", "convert"),
        *("select", "concatenate", "get-tuple-element", "dynamic-update-slice", "broadcast"),
        *("all-to-all", "all-gather", "collective-permute", "all-reduce", "opt-barrier"),
    ]
)
# Opcodes that keep a sharding: an annotation of their result explains the sharding of their operand.
_FOLLOWED = frozenset(
    [
        *("reshape", "transpose", "copy", "convert", "bitcast", "add", "subtract", "multiply"),
        *("divide", "maximum", "minimum", "negate", "tanh", "exponential", "log", "select"),
        *("abs", "sqrt", "rsqrt", "logistic", "compare", "and", "or", "not", "power", "sign"),
        *("get-tuple-element", "opt-barrier", "clamp", "broadcast"),
    ]
)
_SEARCH_LIMIT = 24  # How many instructions a search follows.


@dataclasses.dataclass(frozen=True)
class PropagatedTensor:
    """A tensor of the program after sharding propagation."""

    # The TensorFlow operation that produces it; 'args[0]' for an argument; '' for tensors of loops and of the program
    # itself.
    op: str
    dtype: str  # HLO's element type, e.g. 'f32'
    shape: tuple[int, ...]  # the global shape
    sharding: TensorSharding  # the sharding that propagation chose
    phase: str  # one of parts.PHASES
    in_loop: bool = False  # whether it is computed in the body of a loop


@dataclasses.dataclass(frozen=True)
class Annotation:
    """A tensor that the user annotated; `of` is the operation that produced it."""

    tensor: PropagatedTensor
    of: str


@dataclasses.dataclass(frozen=True)
class Communication:
    """A collective that the partitioner inserted."""

    kind: str  # all-to-all, all-gather, ...
    reason: str  # one of REASONS
    op: str  # the operation that it was inserted for
    moved: str  # the operation whose value is sent
    # For a reshard, the annotation that requests the new sharding; '' if none is near.
    asked_by: str
    annotated_by: str  # for a reshard, the annotation that set the old sharding; '' if none is near
    # Bytes on one device in one execution, of its operands or its results, whichever are larger.
    num_bytes: int
    participants: int  # devices in one replica group
    groups: int  # number of replica groups
    # Executions in one run of the program; None if a loop's trip count is unknown.
    times: int | None
    phase: str  # one of parts.PHASES
    # `source`, `target`: the moved tensor's sharding before and after, if known.
    source: TensorSharding | None = None
    target: TensorSharding | None = None
    # `shape`, `dtype`: the moved tensor's global shape and element type, if known.
    shape: tuple[int, ...] = ()
    dtype: str = ""


class Propagated:
    """Looks up tensors and annotations in the module after propagation and before partitioning."""

    def __init__(self, module: Module):
        self.module = module
        self.num_devices = num_devices(module.attributes) or 1
        self._all = list(module.executions(once=True))
        self._loops = {
            e.instruction.attribute("body").lstrip("%")
            for e in self._all
            if e.instruction.opcode == "while"
        }

    def shardings(self, instruction: Instruction) -> tuple[TensorSharding, ...]:
        """The shardings of an instruction, one for each array of its result; () if it has none."""
        text = instruction.attribute("sharding")
        shardings = parse_sharding(text, self.num_devices) if text else ()
        return shardings * len(instruction.arrays) if len(shardings) == 1 else shardings

    @functools.cached_property
    def by_op_name(self) -> dict[str, list[Executed]]:
        """Instructions by their complete op_name."""
        table: dict[str, list[Executed]] = {}
        for at in self._all:
            table.setdefault(at.instruction.op_name, []).append(at)
        return table

    @functools.cached_property
    def by_operation(self) -> dict[str, list[Executed]]:
        """Instructions by TensorFlow operation."""
        table: dict[str, list[Executed]] = {}
        for at in self._all:
            for name in parts.operations(at.instruction.op_name):
                table.setdefault(name, []).append(at)
        return table

    def Tensors(self, operation: str) -> list[PropagatedTensor]:
        """The tensors that an operation produces, for each loop or branch that contains it.

        An operation may have become several instructions. Those that other operations read count; if
        they differ in shape (e.g. because of broadcast constants), only the last one counts.
        """
        tensors: list[PropagatedTensor] = []
        places: dict[str, list[Executed]] = {}
        for at in self.by_operation.get(operation, ()):
            places.setdefault(at.computation.name, []).append(at)
        for inside in places.values():
            names = {at.instruction.name for at in inside}
            leaving = [at for at in inside if self._leaves(at, names)] or inside[-1:]
            shapes = {at.instruction.arrays: at for at in leaving}
            if len(leaving) > 1 and len(shapes) > 1:  # Broadcast constants and the like.
                leaving = leaving[-1:]
            for at in leaving:
                tensors += self._tensors(at, operation)
        return tensors

    def Annotations(self) -> list[Annotation]:
        """All annotated tensors, in program order."""
        annotations = []
        for name, places in self.by_operation.items():
            if not _ANNOTATION.search(name):
                continue
            for at in places:
                if at.instruction.opcode not in ("copy", "custom-call"):
                    continue
                annotations += [Annotation(t, self._made_by(at)) for t in self._tensors(at, name)]
        return annotations

    def _made_by(self, at: Executed) -> str:
        """The operation that produces the operand of the copy `at`; '' if it has no name."""
        instruction = at.instruction
        for _ in range(_SEARCH_LIMIT):
            if not instruction.operands:
                return ""
            instruction = at.computation.by_name[instruction.operands[0]]
            if operation_of(instruction.op_name) or instruction.opcode not in (
                "copy",
                "custom-call",
            ):
                return operation_of(instruction.op_name)
        return ""

    def _leaves(self, at: Executed, names: set[str]) -> bool:
        users = at.computation.users.get(at.instruction.name, ())
        return at.instruction.is_root or any(user.name not in names for user in users)

    def _tensors(self, at: Executed, operation: str) -> Iterator[PropagatedTensor]:
        instruction = at.instruction
        shardings = self.shardings(instruction)
        phase = parts.phase(instruction.op_name, at.in_backward_loop)
        in_loop = at.computation.name in self._loops
        for array, sharding in zip(instruction.arrays, shardings):
            yield PropagatedTensor(operation, array.dtype, array.dims, sharding, phase, in_loop)


def operation_of(op_name: str) -> str:
    """The TensorFlow operation of an op_name, the first if there are several; '' if there is none."""
    return next(iter(parts.operations(op_name)), "")


def communications(before: Propagated, after: Module) -> list[Communication]:
    """Returns the collectives of a partitioned module in program order, each with its cause."""
    inserted = []
    loops: dict[str, str] = {}  # Name of a loop's body -> the loop's operation.
    for executed in after.executions(unknown=0):
        instruction = executed.instruction
        if instruction.opcode == "while":
            body = instruction.attribute("body").lstrip("%")
            loops[body] = operation_of(instruction.op_name) or "loop"
        use = collective_use(instruction, executed.computation, after.attributes)
        if use is not None:
            cause = _Cause(before, executed, loops)
            inserted.append(
                Communication(
                    kind=use.kind,
                    reason=cause.reason,
                    op=cause.op,
                    moved=cause.moved,
                    asked_by=cause.asked_by,
                    annotated_by=cause.annotated_by,
                    num_bytes=use.bytes,
                    participants=use.participants,
                    groups=use.groups,
                    times=executed.times or None,
                    phase=cause.phase,
                    **cause.change,
                )
            )
    return inserted


class _Cause:
    """Finds why one collective is there."""

    def __init__(self, before: Propagated, executed: Executed, loops: dict[str, str]):
        self._before, self._executed = before, executed
        self._kind = executed.instruction.opcode.removesuffix("-start")
        op_name = executed.instruction.op_name
        self._origin = _origin(executed)
        self._is_inner = self._origin.op_name == op_name
        self._group = self._same_place(before.by_op_name.get(op_name, []))
        self._wanting = self._find_wanting()
        # Values carried by a loop have no op_name; then an annotation that reads them names them.
        self._reader = "" if operation_of(op_name) else self._reading_annotation()
        loop = loops.get(executed.computation.name, "")
        self.op = operation_of(op_name) or self._reader or loop
        self.moved = operation_of(self._origin.op_name) or self.op
        self.reason = self._reason()
        self.phase = parts.phase(op_name, executed.in_backward_loop)
        self.asked_by, self.annotated_by = self._annotations()

    @property
    def change(self) -> dict:
        """The fields source, target, shape and dtype of Communication, as far as they are known."""
        wanting = self._wanting
        if wanting is None or self._reader or self.reason in (PARTIAL, HALO):
            return {}
        moved = wanting.instruction if self._is_inner else self._moved_operand(wanting)
        if moved is None or len(moved.arrays) != 1:
            return {}
        array = moved.arrays[0]
        out: dict = {"shape": array.dims, "dtype": array.dtype}
        if self._is_inner:
            return out | {"source": self._as_computed(wanting), "target": self._sharding(moved)}
        target = None
        if self._executed.instruction.arrays[0].dims == array.dims:
            target = TensorSharding(REPLICATED, devices=tuple(range(self._before.num_devices)))
        elif wanting.instruction.opcode == "transpose":
            target = transposed_back(self._sharding(wanting.instruction), wanting.instruction)
        elif wanting.instruction.opcode in _FOLLOWED and wanting.instruction.arrays == moved.arrays:
            target = self._sharding(wanting.instruction)
        source = self._sharding(moved)
        return out | {"source": source, "target": target or self._exchanged(source, array.dims)}

    def _exchanged(
        self, source: TensorSharding | None, shape: tuple[int, ...]
    ) -> TensorSharding | None:
        """The sharding after an all-to-all among all devices of a tensor sharded along one dimension.

        It is derived from the shape of a device's part after the received pieces are joined; None if
        no such shape is found.
        """
        if source is None or self._executed.instruction.opcode != "all-to-all":
            return None
        if max(source.tiles, default=1) != self._before.num_devices:
            return None
        for part in self._put_together():
            if len(part) == len(shape):
                tiles = tuple(-(-n // p) for n, p in zip(shape, part, strict=True))
                if sorted(tiles) == sorted(source.tiles):
                    return TensorSharding("tiled", tiles, source.devices, source.subgroups)
        return None

    def _put_together(self) -> list[tuple[int, ...]]:
        """The shapes that the received pieces are reshaped to, the last one first."""
        instruction, inside = self._executed.instruction, self._executed.computation
        shapes = []
        for _ in range(_SEARCH_LIMIT):
            users = inside.users.get(instruction.name, ())
            if len(users) != 1 or users[0].opcode not in ("reshape", "transpose", "copy"):
                break
            instruction = users[0]
            if instruction.op_name == self._executed.instruction.op_name:
                shapes.append(instruction.arrays[0].dims)
        return shapes[::-1]

    def _as_computed(self, at: Executed) -> TensorSharding | None:
        """The sharding of a matrix product if each device multiplies its own parts; None for others."""
        if at.instruction.opcode != "dot":
            return None
        operands = [at.computation.by_name[name] for name in at.instruction.operands]
        return product_sharding(at.instruction, *(self._sharding(i) for i in operands))

    def _sharding(self, instruction: Instruction) -> TensorSharding | None:
        shardings = self._before.shardings(instruction)
        return shardings[0] if len(shardings) == 1 else None

    def _same_place(self, group: list[Executed]) -> list[Executed]:
        """The instructions of `group` in the same computation as the collective, or all if none is."""
        name = self._executed.computation.name
        here = [at for at in group if name in (at.computation.name, f"{at.computation.name}_spmd")]
        return here or group

    def _find_wanting(self) -> Executed | None:
        """The instruction before partitioning that the collective was inserted for."""
        if self._is_inner:
            same = [at for at in self._group if at.instruction.opcode == self._origin.opcode]
            candidates = same or self._group
            return candidates[-1] if candidates else None
        reading = [at for at in self._group if self._moved_operand(at) is not None]
        candidates = reading or self._group
        return candidates[0] if candidates else None

    def _moved_operand(self, at: Executed) -> Instruction | None:
        operands = (at.computation.by_name.get(name) for name in at.instruction.operands)
        named = [i for i in operands if i is not None and i.op_name == self._origin.op_name]
        return named[0] if named else None

    def _reason(self) -> str:
        op_name = self._executed.instruction.op_name
        if _BORDER.search(op_name) or not self.op:
            return RESULT
        opcodes = {at.instruction.opcode for at in self._group}
        reduced = self._is_inner and self._origin.opcode in _REDUCING
        if self._kind in ("all-reduce", "reduce-scatter"):
            is_copy = opcodes and opcodes <= {"copy", "tuple", "custom-call"}
            return RESHARD if is_copy and not reduced else PARTIAL
        if self._kind == "all-gather" and reduced and self._origin.opcode == "reduce":
            return PARTIAL  # E.g. argmax gathers the maximum and its index from each device.
        if self._kind == "collective-permute" and opcodes & set(_REACHING):
            return HALO
        return RESHARD

    def _annotations(self) -> tuple[str, str]:
        """(asked_by, annotated_by)."""
        wanting = self._wanting
        if self.reason in (PARTIAL, HALO):
            return "", ""
        if wanting is None or self._reader:
            return self._reader, ""
        if _is_annotation(wanting.instruction):
            asked_by = operation_of(wanting.instruction.op_name)
        else:
            asked_by = self._annotation_behind(wanting)
        return asked_by, self._annotation_of_moved(wanting)

    def _reading_annotation(self) -> str:
        """The annotation that is the only reader of the received value; '' if there is none."""
        instruction, inside = self._executed.instruction, self._executed.computation
        for _ in range(_SEARCH_LIMIT):
            users = inside.users.get(instruction.name, ())
            if len(users) != 1 or users[0].opcode not in _MOVING:
                return ""
            instruction = users[0]
            if _is_annotation(instruction):
                return operation_of(instruction.op_name)
        return ""

    def _annotation_behind(self, at: Executed) -> str:
        """The nearest annotation that requests the sharding of `at`, past operations that keep it."""
        wanted = self._tiles(at.instruction)
        waiting, seen = [at.instruction], {at.instruction.name}
        while waiting and len(seen) < _SEARCH_LIMIT:
            for user in at.computation.users.get(waiting.pop(0).name, ()):
                if user.name in seen or self._tiles(user) != wanted:
                    continue
                if _is_annotation(user):
                    return operation_of(user.op_name)
                seen.add(user.name)
                if user.opcode in _FOLLOWED:
                    waiting.append(user)
        return ""

    def _annotation_of_moved(self, at: Executed) -> str:
        """Returns the op name of the annotation that set the sharding of the tensor sent; '' if none is near.

        The search starts at the operand of `at` that the collective sends. From there it goes back through operations
        that keep the sharding, along the first operand of each.
        """
        moved = None if self._is_inner else self._moved_operand(at)
        for _ in range(_SEARCH_LIMIT):
            if moved is None:
                return ""
            if _is_annotation(moved):
                return operation_of(moved.op_name)
            if moved.opcode not in _FOLLOWED or not moved.operands:
                return ""
            moved = at.computation.by_name.get(moved.operands[0])
        return ""

    def _tiles(self, instruction: Instruction) -> list[int] | None:
        sharding = self._sharding(instruction)
        return None if sharding is None else sorted(n for n in sharding.tiles if n > 1)


def _is_annotation(instruction: Instruction) -> bool:
    return bool(_ANNOTATION.search(operation_of(instruction.op_name)))


def _origin(executed: Executed) -> Instruction:
    """The instruction whose value a collective sends, past instructions that only move data."""
    instruction, inside = executed.instruction, executed.computation
    for _ in range(_SEARCH_LIMIT):
        operands = inside.operands(instruction)
        if not operands:
            return instruction
        # If the value is masked or padded, the largest operand is the value itself.
        instruction = max(operands, key=lambda i: i.num_bytes if i.opcode != "constant" else -1)
        if instruction.op_name != executed.instruction.op_name or instruction.opcode not in _MOVING:
            return instruction
    return instruction
