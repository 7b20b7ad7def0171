"""Counts the bytes that an instruction moves to and from the device's main memory (HBM).

An executed instruction reads its operands and writes its result, including the padding of tiles.
Arrays in on-chip memory cost nothing. Slices, gathers and updates in place count only the elements
that they touch, also inside fusions.
"""

import math

from lingvo_moe.analysis.programs.hlo.instructions import Array, Computation, Instruction
from lingvo_moe.analysis.programs.hlo.module import Module

# Opcodes that only name, group or forward memory. Computations that they call are counted separately.
FREE = frozenset(
    [
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "add-dependency"),
        *("while", "conditional", "call", "async-start", "async-update", "after-all", "domain"),
        *("opt-barrier", "partition-id", "replica-id"),
        *("send", "recv"),  # between TPU slices: part of a collective
    ]
)
_VIEWS = ("bitcast", "reshape", "convert", "copy", "transpose")
_WITH_WORKSPACE = ("__cublas$", "__cudnn$conv")  # targets of a GPU program's calls
_NO_TRAFFIC_TARGETS = ("AllocateBuffer", "AssumeGatherIndicesInBound")


def hbm_bytes(module: Module, inside: Computation, instruction: Instruction) -> int:
    """Bytes that one execution reads and writes."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done"):
        return 0
    if any(f'"{target}"' in instruction.attributes for target in _NO_TRAFFIC_TARGETS):
        return 0
    operands = inside.operands(instruction)
    read = 0.0
    for operand in dict.fromkeys(instruction.operands):
        arrays = inside.by_name[operand].arrays
        size = float(sum(map(in_hbm, arrays)))
        if size and len(arrays) == 1:
            size *= _fraction(_touched(module, instruction, operand), arrays[0])
        read += size
    written = _results(module, instruction, operands)
    return round(read + written)


def in_hbm(array: Array) -> int:
    """Bytes of an array in main memory, with the padding of tiles; 0 for one elsewhere."""
    return array.padded_bytes if array.memory_space == 0 else 0


def _fraction(elements: float, array: Array) -> float:
    return min(1.0, elements / max(1, math.prod(array.dims)))


def _size(instruction: Instruction) -> int:
    return sum(math.prod(array.dims) for array in instruction.arrays)


def _touched(module: Module, user: Instruction, operand: str) -> float:
    """Counts the elements of `operand` that the instruction `user` reads; infinite means all of them."""
    places = [i for i, name in enumerate(user.operands) if name == operand]
    if user.opcode == "fusion":
        called = module.computation(user.called[0])
        return sum(_read(module, called, called.parameters[i].name) for i in places)
    if places != [0]:
        return math.inf
    if user.opcode in ("dynamic-slice", "slice", "gather"):
        return _size(user)
    if user.opcode in ("dynamic-update-slice", "scatter"):
        return 0  # Of a scatter `_results` counts the read and the write of the updated elements.
    return math.inf


def _read(module: Module, inside: Computation, name: str) -> float:
    """Counts the elements of an array that the instructions inside a fusion read.

    The counts of all users are added, so the sum may exceed the array's size. Views of the array (e.g. a bitcast or a
    transpose) do not count; their users do.

    Args:
        name: the array: a parameter or an instruction of it.
    """
    total = 0.0
    for user in inside.users.get(name, ()):
        if user.opcode in _VIEWS and not user.is_root:
            total += _read(module, inside, user.name)
        else:
            total += _touched(module, user, name)
    return total


def _results(module: Module, instruction: Instruction, operands: list[Instruction]) -> float:
    arrays = instruction.arrays
    if any(f'"{library}' in instruction.attributes for library in _WITH_WORKSPACE):
        arrays = arrays[:1]  # A workspace follows.
    if instruction.opcode == "copy-start":
        arrays = arrays[:1]  # The operand and a context follow.
    # The result of most starts is a tuple that begins with their operands.
    elif instruction.opcode.endswith("-start"):
        taken = tuple(array for operand in operands for array in operand.arrays)
        arrays = arrays[len(taken) :] if arrays[: len(taken)] == taken else arrays
    if instruction.opcode == "dynamic-update-slice":
        return in_hbm(arrays[0]) * _fraction(_size(operands[1]), arrays[0])
    if instruction.opcode == "scatter":
        return sum(in_hbm(array) * _fraction(2 * _size(operands[-1]), array) for array in arrays)
    if instruction.opcode != "fusion":
        return sum(map(in_hbm, arrays))
    written = _fusion_results(module, module.computation(instruction.called[0]))
    if len(written) != len(arrays):
        return sum(map(in_hbm, arrays))
    return sum(
        in_hbm(array) * _fraction(elements, array)
        for array, elements in zip(arrays, written, strict=True)
    )


def _fusion_results(module: Module, called: Computation) -> list[int]:
    """The number of elements that a fusion writes of each array of its result."""
    root = called.root
    results = called.operands(root) if root.opcode == "tuple" else [root]
    return [elements for result in results for elements in _written(module, called, result)]


def _written(module: Module, inside: Computation, result: Instruction) -> list[int]:
    while result.opcode in ("bitcast", "reshape"):
        result = inside.by_name[result.operands[0]]
    if result.opcode == "fusion":
        return _fusion_results(module, module.computation(result.called[0]))
    if result.opcode == "dynamic-update-slice" and _is_parameter(inside, result.operands[0]):
        return [_size(inside.by_name[result.operands[1]])]
    if result.opcode == "scatter" and _is_parameter(inside, result.operands[0]):
        return [2 * _size(inside.by_name[result.operands[-1]])]
    return [math.prod(array.dims) for array in result.arrays]


def _is_parameter(inside: Computation, name: str) -> bool:
    instruction = inside.by_name[name]
    while instruction.opcode in _VIEWS:
        instruction = inside.by_name[instruction.operands[0]]
    return instruction.opcode == "parameter"
