"""Detects operations for which XLA's SPMD partitioner is known to compute wrong numbers, and names remedies.

    for fault in known_faults(parse_module(partition(program).before)):
        print(fault)

The faults are those of the partitioner in jaxlib 0.10.2 that the conformance suite (tests/spmd) found.
They are detected in the module after sharding propagation and before partitioning, where every instruction
has its sharding. The conditions were found by comparing with one device. They are narrow: every reported
operation is wrong, but for scatters whose wrong elements may come to no harm, and for SLICE and REPLACED, which are
wrong only where a number that the program is given is out of range; and a program without reports may
still be wrong. These cases are not detected:

- SCATTER: updates that are sharded differently from the target along the window's dimensions;
- COPIES and POOLING: windows that reach far beyond a neighbouring part;
- COPIES: most operands that XLA first groups by their batch or output features;
- ONE_INDEX: targets that other operations, or shardings into fewer parts, divide from the unsharded tensor;
- PADDED_WINDOWS: windows of a part that do not cover exactly two parts of the image;
- SUMS: sharded results, some of which are wrong;
- SLICE and REPLACED: starts that are computed in a loop or a branch, or that depend on other than integer arguments;
- ADDING_UP and EXCHANGED: other orders of devices, some of which are wrong, depending on sizes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from lingvo_moe.analysis.programs.hlo.groups import num_devices
from lingvo_moe.analysis.programs.hlo.instructions import Computation, Instruction
from lingvo_moe.analysis.programs.hlo.module import Module
from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding, parse_sharding
from lingvo_moe.analysis.programs.partitioner import (
    faults_of_gathers as gathers,
    faults_of_products as products,
    faults_of_scatters as scatters,
    faults_of_slices as slices,
    faults_of_sums as sums,
    faults_of_windows as windows,
)
from lingvo_moe.analysis.programs.partitioner.faults_of_products import Dot
from lingvo_moe.analysis.programs.partitioner.spmd import operation_of
from lingvo_moe.core.sharding import ShardingError

SCATTER = "scatter of unevenly sharded updates"
BATCHES = "gather in differently sharded batches"
ONE_INDEX = "scatter of one index into slices of an unsharded tensor"
COPIES = "convolution summed over copies"
GROUPS = "depthwise kernel's gradient sharded along its dimension of one element"
PADDED_WINDOWS = "kernel gradient of windows in padding"
POOLING = "gradient of overlapping max pooling"
SPREAD = "padding between elements of an unsharded dimension"
BATCH = "product with a resharded batch"
EXCHANGED = "product scattered in another order of devices"
SUMS = "sum over differently sharded dimensions"
ADDING_UP = "sum over devices in another order"
SLICE = "sharded slice from a start that may be out of range"
REPLACED = "replaced element of a sharded dimension whose place may be out of range"
# Wrong for some values only: a warning, and no error.
_CONDITIONAL = (SLICE, REPLACED)

# What goes wrong, and the remedy.
_TEXTS = {
    SCATTER: (
        "the {what} are sharded unevenly along dimension {dim} ({size} in {count} parts), and their "
        "padding lands in row 0, since the indices are not sharded over all devices",
        "shard the indices like the updates, over all devices, or pad the updates to a multiple "
        "of the parts, with indices of -1",
    ),
    BATCHES: (
        "the batch is sharded differently in the operand and in the indices, into numbers of parts of which neither "
        "divides the other: devices take elements of each other's batches",
        "shard the batch alike in operand and indices",
    ),
    ONE_INDEX: (
        "the target is unsharded until just before it is sharded along the scattered dimensions, and devices whose "
        "part does not have the one index write a wrong row",
        "let the target enter the program sharded, do not shard these dimensions, or scatter two rows, the second "
        "with an index of -1",
    ),
    COPIES: (
        "each device sums over its part of the operands, and the sums are added over all devices "
        "though {copies} hold the same part: the result is too large",
        "shard the batch along the unused mesh axis, or split the operands into as many parts as "
        "there are devices",
    ),
    GROUPS: (
        "this gradient of a depthwise kernel is sharded along its dimension of one element, and XLA then shards the "
        "image's channels and not those of the result's gradient",
        "annotate the gradient as replicated, or sharded along channels alone",
    ),
    PADDED_WINDOWS: (
        "the kernel's gradient reads the last windows, which cover only padding, out of range",
        "pad less, so that no window lies after the image, or do not shard these dimensions",
    ),
    POOLING: (
        "the gradient of max pooling, along a sharded dimension with windows of two strides or more, "
        "is off by one element in the first part",
        "do not shard this dimension, or write the pooling as a maximum of shifted slices",
    ),
    SPREAD: (
        "dimension {dim} is padded between its elements, and sharded in the result (in {count} parts) but not in the "
        "operand: each device pads as if it held other elements",
        "annotate the operand with the result's sharding, or lower the function again, which writes such padding "
        "as reshapes",
    ),
    BATCH: (
        "the batch is sharded over other devices in the result than in the operands, namely over those "
        "of the sum: the elements come out in another order",
        "annotate the result with the sharding of the operands' batch, and reshard it after an operation "
        "in between",
    ),
    EXCHANGED: (
        "the result is sharded over the devices of the sum, and over the others in another order than in the "
        "operands: devices get each other's parts",
        "name the mesh axes of the result in the order in which the operands use them, or do not shard the result "
        "over the axes of the sum",
    ),
    SUMS: (
        "the operands agree on the sharding of one summed dimension and not on that of another: the parts "
        "of the former are not added",
        "shard the summed dimensions alike in both operands",
    ),
    ADDING_UP: (
        "the operands' rows have their devices in different orders, and devices with different "
        "columns are added",
        "use a mesh whose devices are in ascending order",
    ),
    SLICE: (
        "the start along dimension {dim}, along which the slice is sharded, is a number that the program is given: "
        "from one above {last}, devices read other elements than the last ones that fit, which one device reads",
        "clip the start: tf.clip_by_value(start, 0, {last})",
    ),
    REPLACED: (
        "one element along dimension {dim}, which is sharded, is replaced at a place that the program is given: "
        "outside of 0 to {last} nothing is replaced, and on one device the first or the last element",
        "clip the place: tf.clip_by_value(place, 0, {last})",
    ),
}
# Opcodes that an all-reduce may have.
_REDUCED = ("add", "multiply", "maximum", "minimum", "and", "or")
_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrongly partitioned operation of a program."""

    kind: str  # one of the constants of this module
    # TensorFlow's operation, e.g. 'gradient_tape/conv/Conv2DBackpropFilter'; '' if it has none.
    op: str
    instruction: str  # the name of the HLO instruction
    message: str  # what goes wrong
    remedy: str  # what to do instead
    is_conditional: bool = False  # whether it depends on the values of arguments

    def __str__(self) -> str:
        return f"{self.op or self.instruction}: {self.message}. Instead: {self.remedy}."


def known_faults(module: Module) -> list[Fault]:
    """Returns the operations of a program that XLA partitions wrongly, in program order.

    Operations of a loop's body are listed once.

    Args:
        module: the module after sharding propagation and before partitioning, e.g. `partition(program).before`.
    """
    devices = num_devices(module.attributes)
    if devices <= 1:
        return []
    return [
        fault
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode in _CHECKS
        for fault in _At(module, computation, instruction, devices).Faults()
    ]


def refuse(faults: Iterable[object], program_name: str, would: str = "would") -> None:
    """Refuses a program for which XLA would compute wrong numbers.

    Args:
        would: the verb of the message: 'would', or 'may'.

    Raises ShardingError: there is a fault; the message names each operation, what goes wrong and the remedy.
    """
    texts = list(dict.fromkeys(str(fault) for fault in faults))
    if not texts:
        return
    lines = [f"- {text}" for text in texts[:_MOST_NAMED]]
    if len(texts) > _MOST_NAMED:
        lines.append(f"- and {len(texts) - _MOST_NAMED} more")
    raise ShardingError(
        f"program {program_name!r}: XLA's partitioner {would} compute wrong numbers for "
        f"{len(texts)} operation{'s' * (len(texts) > 1)}:\n" + "\n".join(lines)
    )


class _At:
    """An instruction that may be partitioned wrongly, its computation, and the shardings of its tensors."""

    def __init__(self, module: Module, inside: Computation, instruction: Instruction, devices: int):
        self.module, self.inside, self.instruction = module, inside, instruction
        self._num_devices = devices
        self.operands = inside.operands(instruction)

    def Sharding(self, instruction: Instruction) -> TensorSharding | None:
        """The sharding of an instruction, by default replicated; None unless its result is one array."""
        if len(instruction.arrays) != 1:
            return None
        text = instruction.attribute("sharding") or "{replicated}"
        return parse_sharding(text, self._num_devices)[0]

    @functools.cached_property
    def shardings(self) -> list[TensorSharding]:
        """The shardings of the operands, then of the result; [] if any is maximal, manual or unknown."""
        shardings = [self.Sharding(i) for i in (*self.operands, self.instruction)]
        plain = [s for s in shardings if s is not None and s.kind in ("replicated", "tiled")]
        return plain if len(plain) == len(shardings) and all(s.manual == 1 for s in plain) else []

    def UnevenDims(self, instruction: Instruction) -> list[int]:
        """The dimensions along which some parts of an instruction's result are padded."""
        sharding = self.Sharding(instruction)
        if sharding is None:
            return []
        return [d for d, n in enumerate(sharding.Padding(instruction.arrays[0].dims)) if n]

    def Faults(self) -> Iterator[Fault]:
        if not self.shardings:
            return
        for kind, more in _CHECKS[self.instruction.opcode](self):
            message, remedy = _TEXTS[kind]
            op = operation_of(self.instruction.op_name)
            message, remedy = message.format(**more), remedy.format(**more)
            yield Fault(kind, op, self.instruction.name, message, remedy, kind in _CONDITIONAL)


_Found = Iterator[tuple[str, dict[str, object]]]


def _in_dot(at: _At) -> _Found:
    lhs, rhs, result = at.shardings
    if not (lhs.is_sharded and rhs.is_sharded):
        return
    what = Dot(at.instruction, at.operands[0], at.operands[1], lhs, rhs, result)
    over_devices = sums.sum_of(what)
    if over_devices and over_devices.ReshardsBatch():
        yield BATCH, {}
    if over_devices and over_devices.ExchangesParts():
        yield EXCHANGED, {}
    if products.sums_differently_sharded_dims(what):
        yield SUMS, {}
    if products.adds_up_other_devices(what):
        yield ADDING_UP, {}


def _in_convolution(at: _At) -> _Found:
    what = windows.Convolution(at.instruction, at.operands, at.shardings)
    if what.ShardsGroups():
        yield GROUPS, {}
    if not all(s.is_sharded for s in at.shardings[:2]):
        return
    if what.AddsUpCopies():
        yield COPIES, {"copies": what.copies}
    elif what.SumsDifferentlyCutDims() and not at.shardings[2].is_sharded:
        yield SUMS, {}
    elif what.SkipsPadding():
        yield PADDED_WINDOWS, {}


def _in_select_and_scatter(at: _At) -> _Found:
    result = at.shardings[-1]
    if result.is_sharded and windows.overlaps_by_its_stride(at.instruction, result):
        yield POOLING, {}


def _in_pad(at: _At) -> _Found:
    before, _, after = at.shardings
    dim = windows.spread_dim(at.instruction, at.operands[0], before, after)
    if dim is not None:
        yield SPREAD, {"dim": dim, "count": after.tiles[dim]}


def _in_gather(at: _At) -> _Found:
    if gathers.disagree_on_batch(at.instruction, at.operands, at.shardings[:2], at.inside):
        yield BATCHES, {}


def _in_scatter(at: _At) -> _Found:
    if len(at.operands) != 3:
        return
    if scatters.reads_another_row(at.instruction, at.operands, at.inside, at.Sharding):
        yield ONE_INDEX, {}
    padded = scatters.padded_dim(at.instruction, at.operands, at.shardings[:3])
    if padded is None:
        return
    _, indices, updates = at.operands
    if scatters.count_on(indices, at.inside):
        return
    combine = [at.module.computation(name).root.opcode for name in at.instruction.called]
    if not set(combine) <= set(_REDUCED):  # XLA gathers the updates.
        return
    if combine == ["add"] and scatters.padding_is_zero(updates, at.inside, at.UnevenDims):
        return
    yield SCATTER, padded


def _in_slice(at: _At) -> _Found:
    if at.inside is at.module.entry:
        unbounded = slices.unbounded_dim(at.instruction, at.operands, at.shardings[-1], at.inside)
        if unbounded:
            yield REPLACED if at.instruction.opcode == slices.REPLACES else SLICE, unbounded


_CHECKS: Mapping[str, Callable[[_At], _Found]] = {
    "dot": _in_dot,
    "convolution": _in_convolution,
    "select-and-scatter": _in_select_and_scatter,
    "pad": _in_pad,
    "gather": _in_gather,
    "scatter": _in_scatter,
    "dynamic-slice": _in_slice,
    "dynamic-update-slice": _in_slice,
}
