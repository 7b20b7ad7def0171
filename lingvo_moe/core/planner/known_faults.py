"""Programs that XLA's SPMD partitioner is known to get wrong, without a word, and what to do instead.

    for fault in known_faults(parse_module(partition(program).before)):
        print(fault)

The faults are those of the partitioner in jaxlib 0.10.2 which the conformance suite (tests/spmd) found.
They are told by the module after sharding propagation and before partitioning: there every instruction
has its sharding. The conditions were found by trial against one device and are narrow: what is named is
wrong, but a program without a fault of these kinds need not be right. Not sharp are

- a dot's ADDING_UP and ROWS: other orders of devices than these are wrong too, in ways that depend on
  sizes;
- SUMS: only of a result that is whole; some that are cut are wrong;
- PADDED_WINDOWS and POOLING: only windows that are not larger than a part, or reach its neighbour.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence

from lingvo_moe.core.planner import faults_of_products as products
from lingvo_moe.core.planner import faults_of_windows as windows
from lingvo_moe.core.planner.faults_of_products import Dot, parts, places
from lingvo_moe.core.planner.hlo import Computation, Instruction, Module
from lingvo_moe.core.planner.hlo_attributes import dims_list
from lingvo_moe.core.planner.hlo_sharding import TensorSharding, parse_sharding
from lingvo_moe.core.planner.spmd import operation_of
from lingvo_moe.core.sharding import ShardingError

SCATTER = "scatter of unevenly cut updates"
COPIES = "convolution summed over copies"
PADDED_WINDOWS = "kernel gradient of windows in padding"
POOLING = "gradient of overlapping max pooling"
BATCH = "product with its batch cut anew"
SUMS = "sum over differently cut dimensions"
ADDING_UP = "sum over devices in another order"
ROWS = "product of differently ordered rows"

# What goes wrong, and what is right instead.
_TEXTS = {
    SCATTER: (
        "the updates are cut unevenly along dimension {dim} ({size} in {count} parts), and their "
        "padding lands in row 0, since the indices are not cut alike over all devices",
        "cut the indices as the updates are cut, over all devices, or pad the updates to a multiple "
        "of the parts, with indices of -1",
    ),
    COPIES: (
        "each device sums over its part of the windows, and the sums are added up over all devices "
        "though {copies} hold the same part: the result is too large",
        "cut the batch along the mesh axis that is idle, or bring the operands into as many parts as "
        "there are devices",
    ),
    PADDED_WINDOWS: (
        "the kernel's gradient takes the last windows, which lie in padding alone, from elements that "
        "are not there",
        "pad less, so that no window lies behind the image, or leave these dimensions whole",
    ),
    POOLING: (
        "the gradient of max pooling, along a cut dimension with windows of two strides or more, "
        "is off by one element in the first part",
        "leave this dimension whole, or write the pooling as a maximum of shifted slices",
    ),
    BATCH: (
        "the batch is cut over other devices in the result than in the operands, those over which "
        "the sum is: the elements come out in another order",
        "annotate the result as the operands' batch is cut, and cut it anew after an operation in "
        "between",
    ),
    SUMS: (
        "the operands agree on the cut of one summed dimension and not on that of another: the parts "
        "of the former are not added up",
        "cut the summed dimensions alike in both operands",
    ),
    ADDING_UP: (
        "the operands' rows have their devices in different orders, and devices with different "
        "columns are added up",
        "use a mesh whose devices are in ascending order",
    ),
    ROWS: (
        "the operands number the devices of a row differently, and the result's rows are exchanged",
        "use the same order of devices for both operands",
    ),
}
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_DOTS: Sequence[tuple[str, Callable[[Dot], bool]]] = (
    (BATCH, products.cuts_the_batch_anew),
    (SUMS, products.sums_differently_cut_dims),
    (ADDING_UP, products.adds_up_other_devices),
    (ROWS, products.numbers_rows_differently),
)
_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Fault:
    """An operation of a program that is partitioned wrongly.

    Attributes:
        kind: one of the constants of this module.
        op: TensorFlow's operation, e.g. 'gradient_tape/conv/Conv2DBackpropFilter'; '' if it has none.
        instruction: HLO's name.
        message: what goes wrong.
        remedy: what is right instead.
    """

    kind: str
    op: str
    instruction: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.op or self.instruction}: {self.message}. Instead: {self.remedy}."


def known_faults(module: Module) -> list[Fault]:
    """The operations of a program that are partitioned wrongly, in order; of a loop's body once.

    Args:
        module: after sharding propagation and before partitioning: `partition(program).before`.
    """
    found = _PARTITIONS.search(module.attributes)
    num_devices = int(found[1]) if found else 1
    if num_devices == 1:
        return []
    return [
        fault
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode in _CHECKS
        for fault in _faults(instruction, computation, num_devices)
    ]


def raise_known_faults(module: Module, program_name: str) -> None:
    """Refuses a program of which XLA would compute something wrong.

    Raises:
        ShardingError: naming each operation, what goes wrong and what is right instead.
    """
    found = list(dict.fromkeys(str(fault) for fault in known_faults(module)))
    if not found:
        return
    lines = [f"- {text}" for text in found[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        lines.append(f"- and {len(found) - _MOST_NAMED} more")
    raise ShardingError(
        f"program {program_name!r}: XLA's partitioner would compute wrong numbers for "
        f"{len(found)} operation{'s' * (len(found) > 1)}:\n" + "\n".join(lines)
    )


def _faults(instruction: Instruction, inside: Computation, num_devices: int) -> Iterator[Fault]:
    operands = inside.operands(instruction)
    everything = [_sharding(i, num_devices) for i in (*operands, instruction)]
    known = [s for s in everything if s is not None]
    if len(known) < len(everything) or any(
        s.kind in ("manual", "maximal") or s.manual > 1 for s in known
    ):
        return
    *shardings, result = known
    for kind, more in _CHECKS[instruction.opcode](instruction, operands, shardings, result):
        message, remedy = _TEXTS[kind]
        op = operation_of(instruction.op_name)
        yield Fault(kind, op, instruction.name, message.format(**more), remedy)


def _sharding(instruction: Instruction, num_devices: int) -> TensorSharding | None:
    """The sharding of an instruction, by default whole; None where it is not one array."""
    if len(instruction.arrays) != 1:
        return None
    text = instruction.attribute("sharding") or "{replicated}"
    return parse_sharding(text, num_devices)[0]


_Found = Iterator[tuple[str, dict[str, int]]]


def _in_dot(
    dot: Instruction,
    operands: Sequence[Instruction],
    shardings: Sequence[TensorSharding],
    result: TensorSharding,
) -> _Found:
    lhs, rhs = shardings
    if lhs.is_cut and rhs.is_cut:
        what = Dot(dot, operands[0], operands[1], lhs, rhs, result)
        yield from ((kind, {}) for kind, is_so in _DOTS if is_so(what))


def _in_convolution(
    convolution: Instruction,
    operands: Sequence[Instruction],
    shardings: Sequence[TensorSharding],
    result: TensorSharding,
) -> _Found:
    if not all(s.is_cut for s in shardings):
        return
    what = windows.Convolution(convolution, operands, shardings)
    if what.AddsUpCopies():
        yield COPIES, {"copies": what.copies}
    elif what.SkipsPadding():
        yield PADDED_WINDOWS, {}


def _in_select_and_scatter(
    scatter: Instruction,
    operands: Sequence[Instruction],
    shardings: Sequence[TensorSharding],
    result: TensorSharding,
) -> _Found:
    if result.is_cut and windows.overlaps_by_its_stride(scatter, result):
        yield POOLING, {}


def _in_scatter(
    scatter: Instruction,
    operands: Sequence[Instruction],
    shardings: Sequence[TensorSharding],
    result: TensorSharding,
) -> _Found:
    if len(operands) != 3:
        return
    target, of_indices, of_updates = shardings
    shape = operands[2].arrays[0].dims
    inner = dims_list(scatter, "update_window_dims")
    outer = [d for d in range(len(shape)) if d not in inner]
    vector = dims_list(scatter, "index_vector_dim")[0]
    rank = len(operands[1].arrays[0].dims)
    index_dims = [d for d in range(rank) if d != vector]
    cut = [d for d, n in zip(outer, parts(of_updates, outer)) if shape[d] % n]
    # Updates that are cut otherwise than the target within a window are sent first; some are right.
    if not cut or _is_sent(target, of_updates, scatter):
        return
    over_all = of_indices.is_cut and of_updates.copies == of_indices.copies == 1
    if over_all and places(of_indices, index_dims) == places(of_updates, outer):
        return
    dim = cut[0]
    yield SCATTER, {"dim": dim, "size": shape[dim], "count": of_updates.tiles[dim]}


def _is_sent(target: TensorSharding, updates: TensorSharding, scatter: Instruction) -> bool:
    """Whether the target is cut along what a window holds, and the updates are not so."""
    if not target.is_cut:
        return False
    inserted = dims_list(scatter, "inserted_window_dims")
    window = [d for d in range(len(target.tiles)) if d not in inserted]
    inner = dims_list(scatter, "update_window_dims")
    return math.prod(parts(target, window)) > 1 and parts(target, window) != parts(updates, inner)


_CHECKS = {
    "dot": _in_dot,
    "convolution": _in_convolution,
    "select-and-scatter": _in_select_and_scatter,
    "scatter": _in_scatter,
}
