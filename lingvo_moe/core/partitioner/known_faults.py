"""Programs that XLA's SPMD partitioner is known to get wrong, without a word, and what to do instead.

    for fault in known_faults(parse_module(partition(program).before)):
        print(fault)

The faults are those of the partitioner in jaxlib 0.10.2 which the conformance suite (tests/spmd) found.
They are told by the module after sharding propagation and before partitioning: there every instruction
has its sharding. The conditions were found by trial against one device and are narrow: what is named is
wrong, but a program without a fault of these kinds need not be right. Not sharp are

- SCATTER: updates that are cut otherwise than the target is within a window are left out;
- COPIES and POOLING: windows that reach far beyond a neighbouring part are left out;
- PADDED_WINDOWS: only where the windows of a part go over exactly two parts of the image;
- SUMS: only of a result that is whole; some that are cut are wrong;
- ADDING_UP and ROWS: other orders of devices than these are wrong too, depending on sizes.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from lingvo_moe.core.hlo.module import Computation, Instruction, Module
from lingvo_moe.core.hlo.sharding import TensorSharding, parse_sharding
from lingvo_moe.core.partitioner import faults_of_products as products
from lingvo_moe.core.partitioner import faults_of_scatters as scatters
from lingvo_moe.core.partitioner import faults_of_windows as windows
from lingvo_moe.core.partitioner.faults_of_products import Dot
from lingvo_moe.core.partitioner.spmd import operation_of
from lingvo_moe.core.sharding import ShardingError
from lingvo_moe.core.suggest import did_you_mean

# What to do with a program that has a fault.
ERROR, WARN, OFF = "error", "warn", "off"
ACTIONS = (ERROR, WARN, OFF)
FLAG_HELP = (
    "what to do with a program that XLA's partitioner is known to compute wrongly: error, warn, or off, which does "
    "not look for any"
)

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
        "padding lands in row 0, since the indices are not cut over all devices",
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


def check_action(action: str, name: str = "known_faults") -> None:
    """Raises ShardingError, naming the flag or argument `name`, where `action` is none of ACTIONS."""
    if action not in ACTIONS:
        raise ShardingError(
            f"{name}={action}: must be one of {', '.join(ACTIONS)}{did_you_mean(action, ACTIONS)}"
        )


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
        for fault in _At(module, computation, instruction, num_devices).Faults()
    ]


def refuse(faults: Iterable[object], program_name: str) -> None:
    """Refuses a program of which XLA would compute something wrong.

    Args:
        faults: of the program; each one's text is told, the same only once.
        program_name: for the message.

    Raises:
        ShardingError: there is a fault; names each operation, what goes wrong and what is right
            instead.
    """
    found = list(dict.fromkeys(str(fault) for fault in faults))
    if not found:
        return
    lines = [f"- {text}" for text in found[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        lines.append(f"- and {len(found) - _MOST_NAMED} more")
    raise ShardingError(
        f"program {program_name!r}: XLA's partitioner would compute wrong numbers for "
        f"{len(found)} operation{'s' * (len(found) > 1)}:\n" + "\n".join(lines)
    )


class _At:
    """An instruction that may be partitioned wrongly, where it is, and how its tensors are cut."""

    def __init__(self, module: Module, inside: Computation, instruction: Instruction, devices: int):
        self.module, self.inside, self.instruction = module, inside, instruction
        self._num_devices = devices
        self.operands = inside.operands(instruction)

    def Sharding(self, instruction: Instruction) -> TensorSharding | None:
        """By default whole; None where it is not of one array."""
        if len(instruction.arrays) != 1:
            return None
        text = instruction.attribute("sharding") or "{replicated}"
        return parse_sharding(text, self._num_devices)[0]

    @functools.cached_property
    def shardings(self) -> list[TensorSharding]:
        """Of the operands and, at the end, of the result; none where some tensor is not everybody's."""
        found = [self.Sharding(i) for i in (*self.operands, self.instruction)]
        known = [s for s in found if s is not None and s.kind in ("replicated", "tiled")]
        return known if len(known) == len(found) and all(s.manual == 1 for s in known) else []

    def IsUneven(self, instruction: Instruction) -> bool:
        """Whether some of its parts are padded."""
        sharding = self.Sharding(instruction)
        return sharding is not None and any(sharding.Padding(instruction.arrays[0].dims))

    def Faults(self) -> Iterator[Fault]:
        if not self.shardings:
            return
        for kind, more in _CHECKS[self.instruction.opcode](self):
            message, remedy = _TEXTS[kind]
            op = operation_of(self.instruction.op_name)
            yield Fault(kind, op, self.instruction.name, message.format(**more), remedy)


_Found = Iterator[tuple[str, dict[str, int]]]


def _in_dot(at: _At) -> _Found:
    lhs, rhs, result = at.shardings
    if lhs.is_cut and rhs.is_cut:
        what = Dot(at.instruction, at.operands[0], at.operands[1], lhs, rhs, result)
        yield from ((kind, {}) for kind, is_so in _DOTS if is_so(what))


def _in_convolution(at: _At) -> _Found:
    if not all(s.is_cut for s in at.shardings[:2]):
        return
    what = windows.Convolution(at.instruction, at.operands, at.shardings[:2])
    if what.AddsUpCopies():
        yield COPIES, {"copies": what.copies}
    elif what.SkipsPadding():
        yield PADDED_WINDOWS, {}


def _in_select_and_scatter(at: _At) -> _Found:
    result = at.shardings[-1]
    if result.is_cut and windows.overlaps_by_its_stride(at.instruction, result):
        yield POOLING, {}


def _in_scatter(at: _At) -> _Found:
    if len(at.operands) != 3:
        return
    dim = scatters.padded_dim(at.instruction, at.operands, at.shardings[:3])
    if dim is None:
        return
    updates = at.operands[2]
    combine = [at.module.computation(name).root.opcode for name in at.instruction.called]
    if combine == ["add"] and scatters.padding_is_zero(updates, at.inside, at.IsUneven):
        return
    size, count = updates.arrays[0].dims[dim], at.shardings[2].tiles[dim]
    yield SCATTER, {"dim": dim, "size": size, "count": count}


_CHECKS: Mapping[str, Callable[[_At], _Found]] = {
    "dot": _in_dot,
    "convolution": _in_convolution,
    "select-and-scatter": _in_select_and_scatter,
    "scatter": _in_scatter,
}
