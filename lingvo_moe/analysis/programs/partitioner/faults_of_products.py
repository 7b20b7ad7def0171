"""Detects matrix products that XLA's SPMD partitioner (of jaxlib 0.10.2) computes wrongly.

The partitioner groups the devices of a dot: those that hold the same part of the summed dimensions, of the
batch, and so on. If the three tensors disagree on the groups, it has several faults. Each function below
detects one of them from the shardings of operands and result; faults_of_sums.py has more. It is narrow: true only if
the numbers are wrong, but not for every wrong dot.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from lingvo_moe.analysis.programs.hlo.attributes import dims_list
from lingvo_moe.analysis.programs.hlo.instructions import Instruction
from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding
from lingvo_moe.analysis.programs.partitioner.sharding_rules import kept_dims


def parts(sharding: TensorSharding, dims: Sequence[int]) -> tuple[int, ...]:
    """Returns into how many parts each of `dims` is sharded; 1 for each if the tensor is not tiled."""
    return tuple(sharding.tiles[d] if sharding.kind == "tiled" else 1 for d in dims)


def places(sharding: TensorSharding, dims: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Maps each device of a tiled tensor to the indices of its part along `dims`."""
    copies = len(sharding.devices) // math.prod(sharding.tiles)
    every = itertools.product(*map(range, sharding.tiles))
    of_devices = zip(sharding.devices, (part for part in every for _ in range(copies)), strict=True)
    return {device: tuple(part[d] for d in dims) for device, part in of_devices}


_Kept = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Dot:
    """A dot, the roles of its dimensions, and the shardings of its operands and its result.

    The summed dimensions are the contracting ones. The free dimensions of an operand are neither batch nor contracting.
    A part is the shard of a tensor that a device holds; copies are devices with the same part.
    """

    instruction: Instruction
    left: Instruction
    right: Instruction
    lhs: TensorSharding
    rhs: TensorSharding
    result: TensorSharding

    def dims(self, key: str) -> tuple[int, ...]:
        return dims_list(self.instruction, key)

    @property
    def summed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(left, right): into how many parts each operand shards each summed dimension."""
        lhs = parts(self.lhs, self.dims("lhs_contracting_dims"))
        return lhs, parts(self.rhs, self.dims("rhs_contracting_dims"))

    @property
    def kept(self) -> tuple[_Kept, _Kept]:
        """The dimensions of each operand that are not summed, and the result's dimensions that correspond to them.

        Batch dimensions come first, then free ones.
        """
        left, right = (len(operand.arrays[0].dims) for operand in (self.left, self.right))
        return kept_dims(self.instruction, "lhs", left), kept_dims(self.instruction, "rhs", right)

    @property
    def free(self) -> tuple[_Kept, _Kept]:
        """The dimensions of `kept` without the batch dimensions."""
        batch = len(self.dims("lhs_batch_dims"))
        left, right = self.kept
        return (left[0][batch:], left[1][batch:]), (right[0][batch:], right[1][batch:])

    @property
    def batch(self) -> tuple[int, int, int]:
        """(left, right, result): into how many parts each tensor's batch is sharded.

        Each is the product over the tensor's batch dimensions.
        """
        count = len(self.dims("lhs_batch_dims"))
        return (
            math.prod(parts(self.lhs, self.dims("lhs_batch_dims"))),
            math.prod(parts(self.rhs, self.dims("rhs_batch_dims"))),
            math.prod(parts(self.result, range(count))),
        )

    @property
    def own(self) -> tuple[int, int]:
        """(left, right): into how many parts the result is sharded along the free dimensions of each operand.

        Each is the product over those dimensions.
        """
        (_, left), (_, right) = self.free
        return math.prod(parts(self.result, left)), math.prod(parts(self.result, right))


def sums_differently_sharded_dims(dot: Dot) -> bool:
    """Whether XLA adds partial sums along only some of the sharded summed dimensions.

    The operands shard one summed dimension alike and the others differently, into the same number of parts in all. XLA
    then adds the partial sums along the latter dimensions only.

    False for a sharded result: some of those are right.
    """
    lhs, rhs = dot.summed
    same = [i for i, (left, right) in enumerate(zip(lhs, rhs)) if left == right > 1]
    if not same or lhs == rhs or math.prod(lhs) != math.prod(rhs) or dot.result.is_sharded:
        return False
    left, right = dot.dims("lhs_contracting_dims"), dot.dims("rhs_contracting_dims")
    return places(dot.lhs, [left[i] for i in same]) == places(dot.rhs, [right[i] for i in same])


def adds_up_other_devices(dot: Dot) -> bool:
    """Whether XLA adds the partial sums of devices that hold different parts of the right operand.

    The left operand is sharded along the summed dimensions only, with several copies of each part. The right operand
    is also sharded along its free dimensions or its batch, and the result likewise. For each part of the sum, XLA
    numbers the copies of the left operand in ascending order of devices. It then adds the partial sums of the devices
    with equal numbers. The result is wrong if those devices hold different free or batch parts of the right operand.

    False unless the left operand is the smallest of the three tensors: XLA does not always reshard the others to fit a
    larger one.
    """
    lhs, rhs = dot.summed
    count = math.prod(lhs)
    if count == 1 or lhs != rhs or dot.lhs.copies == 1 or math.prod(dot.lhs.tiles) != count:
        return False
    if part_bytes(dot.left, dot.lhs) > part_bytes(dot.right, dot.rhs):
        return False
    if dot.left.num_bytes >= dot.instruction.num_bytes:
        return False
    dims = dot.dims("rhs_contracting_dims")
    summed, others = places(dot.rhs, dims), places(dot.rhs, dot.kept[1][0])
    if places(dot.lhs, dot.dims("lhs_contracting_dims")) != summed or not dot.result.is_sharded:
        return False
    if places(dot.result, dot.kept[1][1]) != others:
        return False
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in sorted(summed):
        groups.setdefault(summed[device], []).append(device)
    return any(
        len({others[device] for device in adding}) > 1
        for adding in zip(*groups.values(), strict=True)
    )


def part_bytes(instruction: Instruction, sharding: TensorSharding) -> int:
    """Returns the bytes of one device's part of an instruction's result."""
    array = instruction.arrays[0]
    size = array.num_bytes // max(math.prod(array.dims), 1)
    return math.prod(sharding.PartShape(array.dims)) * size
