"""Detects matrix products that XLA's SPMD partitioner (of jaxlib 0.10.2) computes wrongly.

The partitioner groups the devices of a dot: those that hold the same part of the summed dimensions, of the
batch, and so on. If the three tensors disagree on the groups, it has four faults. Each function below
detects one of them from the shardings of operands and result. It is narrow: true only if the numbers are
wrong, but not for every wrong dot.
"""

import dataclasses
import math
from collections.abc import Sequence

from lingvo_moe.core.hlo.attributes import dims_list
from lingvo_moe.core.hlo.module import Instruction
from lingvo_moe.core.hlo.sharding import TensorSharding


def parts(sharding: TensorSharding, dims: Sequence[int]) -> tuple[int, ...]:
    """Returns into how many parts each of `dims` is sharded; 1 for each if the tensor is not tiled."""
    return tuple(sharding.tiles[d] if sharding.kind == "tiled" else 1 for d in dims)


def places(sharding: TensorSharding, dims: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Maps each device of a tiled tensor to the indices of its part along `dims`."""
    held = len(sharding.devices) // math.prod(sharding.tiles)
    found = {}
    for place, device in enumerate(sharding.devices):
        number, where = place // held, []
        for count in reversed(sharding.tiles):
            number, index = divmod(number, count)
            where.append(index)
        where.reverse()
        found[device] = tuple(where[d] for d in dims)
    return found


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
    def further(self) -> tuple[int, ...]:
        """Dimensions of the right operand that are not summed: batch dimensions first, then free ones."""
        batch, summed = self.dims("rhs_batch_dims"), self.dims("rhs_contracting_dims")
        rank = len(self.right.arrays[0].dims)
        return (*batch, *(d for d in range(rank) if d not in (*batch, *summed)))

    @property
    def further_in_result(self) -> tuple[int, ...]:
        """The dimensions of the result that correspond to those of `further`, in the same order."""
        rank, batch = len(self.instruction.arrays[0].dims), len(self.dims("rhs_batch_dims"))
        return (*range(batch), *range(rank - len(self.further) + batch, rank))

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
        rank, batch = len(self.instruction.arrays[0].dims), len(self.dims("lhs_batch_dims"))
        left = len(self.left.arrays[0].dims) - len(self.dims("lhs_contracting_dims"))
        return (
            math.prod(parts(self.result, range(batch, left))),
            math.prod(parts(self.result, range(left, rank))),
        )


def reshards_the_batch(dot: Dot) -> bool:
    """Whether XLA returns the elements of a batch dimension in a wrong order.

    Both operands shard the batch dimension over some devices and the summed dimensions over others. The result shards
    the batch dimension into as many parts as the sum has, and XLA wrongly takes the devices of the sum for those of the
    batch. Other batch dimensions do not matter.

    False if the number of the result's copies is a multiple of the number of parts of the sum, or if the result shards
    the free dimensions of an operand into as many parts: XLA then takes those devices for the sum.
    """
    summed, same = dot.summed
    count = math.prod(summed)
    lhs = parts(dot.lhs, dot.dims("lhs_batch_dims"))
    rhs = parts(dot.rhs, dot.dims("rhs_batch_dims"))
    result = parts(dot.result, range(len(lhs)))
    return (
        count > 1
        and summed == same
        and lhs == rhs
        and any(before > 1 and after == count for before, after in zip(lhs, result))
        and count not in dot.own
        and dot.result.copies % count != 0
    )


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
    if _part_bytes(dot.left, dot.lhs) > _part_bytes(dot.right, dot.rhs):
        return False
    if dot.left.num_bytes >= dot.instruction.num_bytes:
        return False
    dims = dot.dims("rhs_contracting_dims")
    summed, others = places(dot.rhs, dims), places(dot.rhs, dot.further)
    if places(dot.lhs, dot.dims("lhs_contracting_dims")) != summed or not dot.result.is_sharded:
        return False
    if places(dot.result, dot.further_in_result) != others:
        return False
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in sorted(summed):
        groups.setdefault(summed[device], []).append(device)
    return any(
        len({others[device] for device in adding}) > 1
        for adding in zip(*groups.values(), strict=True)
    )


def numbers_rows_differently(dot: Dot) -> bool:
    """Whether XLA exchanges rows of the result, because the operands order the devices differently.

    The right operand is sharded along the batch and the summed dimensions. The result is sharded along the batch and
    the left operand's free dimension, with the same order of devices. The left operand is sharded along its free
    dimension and the summed ones; among the devices with the same part of the sum it has another order. XLA reshards
    the left operand along the batch in the left operand's order, and the right one to match. But it takes the result
    to be in the right operand's order.
    """
    lhs, rhs = dot.summed
    in_lhs, in_rhs, in_result = dot.batch
    if math.prod(lhs) == 1 or lhs != rhs or not 1 == in_lhs < in_rhs == in_result:
        return False
    own = [d for d in range(len(dot.lhs.tiles)) if d not in dot.dims("lhs_contracting_dims")]
    if max(dot.lhs.copies, dot.rhs.copies, dot.result.copies) > 1:
        return False
    if math.prod(parts(dot.lhs, own)) != in_rhs:
        return False
    batch = len(dot.dims("lhs_batch_dims"))
    summed = _flat(dot.rhs, dot.dims("rhs_contracting_dims"))
    of_batch = _flat(dot.rhs, dot.dims("rhs_batch_dims"))
    if _flat(dot.lhs, dot.dims("lhs_contracting_dims")) != summed:
        return False
    if _flat(dot.result, range(batch)) != of_batch:
        return False
    if _flat(dot.result, range(batch, len(dot.result.tiles))) != summed:
        return False
    of_own = _flat(dot.lhs, own)
    pairs = {(of_own[device], of_batch[device]) for device in summed}
    return len(pairs) == in_rhs and any(left != right for left, right in pairs)


def _flat(sharding: TensorSharding, dims: Sequence[int]) -> dict[int, int]:
    """Maps each device to the index of its part along `dims`, flattened in row-major order."""
    counts, found = parts(sharding, dims), {}
    for device, place in places(sharding, dims).items():
        found[device] = 0
        for index, count in zip(place, counts):
            found[device] = found[device] * count + index
    return found


def _part_bytes(instruction: Instruction, sharding: TensorSharding) -> int:
    array = instruction.arrays[0]
    size = array.num_bytes // max(math.prod(array.dims), 1)
    return math.prod(sharding.PartShape(array.dims)) * size
