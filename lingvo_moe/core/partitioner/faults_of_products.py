"""Which products of matrices XLA's SPMD partitioner (that of jaxlib 0.10.2) gets wrong.

A dot is split into groups of devices: those that hold the same part of the summed dimensions, of the
batch, and so on. Where the three tensors do not agree on the groups, the partitioner has four faults.
Each function says when, from how the operands and the result are cut, narrowly: it is true only where
the numbers are wrong, and there may be more that are wrong.
"""

import dataclasses
import math
from collections.abc import Sequence

from lingvo_moe.core.hlo.attributes import dims_list
from lingvo_moe.core.hlo.module import Instruction
from lingvo_moe.core.hlo.sharding import TensorSharding


def parts(sharding: TensorSharding, dims: Sequence[int]) -> tuple[int, ...]:
    """The number of parts of some dimensions; 1 where the tensor is whole."""
    return tuple(sharding.tiles[d] if sharding.kind == "tiled" else 1 for d in dims)


def places(sharding: TensorSharding, dims: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each device of a tiled tensor the number of its part along some dimensions."""
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
    """A dot, which dimensions of it are which, and how its operands and its result are cut."""

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
        """The number of parts of each summed dimension in the two operands."""
        lhs = parts(self.lhs, self.dims("lhs_contracting_dims"))
        return lhs, parts(self.rhs, self.dims("rhs_contracting_dims"))

    @property
    def further(self) -> tuple[int, ...]:
        """The dimensions of the right operand that are not summed: those of the batch first."""
        batch, summed = self.dims("rhs_batch_dims"), self.dims("rhs_contracting_dims")
        rank = len(self.right.arrays[0].dims)
        return (*batch, *(d for d in range(rank) if d not in (*batch, *summed)))

    @property
    def further_in_result(self) -> tuple[int, ...]:
        """The same dimensions in the result."""
        rank, batch = len(self.instruction.arrays[0].dims), len(self.dims("rhs_batch_dims"))
        return (*range(batch), *range(rank - len(self.further) + batch, rank))

    @property
    def batch(self) -> tuple[int, int, int]:
        """The number of parts of the batch dimensions in operands and result, all together."""
        count = len(self.dims("lhs_batch_dims"))
        return (
            math.prod(parts(self.lhs, self.dims("lhs_batch_dims"))),
            math.prod(parts(self.rhs, self.dims("rhs_batch_dims"))),
            math.prod(parts(self.result, range(count))),
        )

    @property
    def own(self) -> tuple[int, int]:
        """The number of parts of the result along the operands' own dimensions, all together."""
        rank, batch = len(self.instruction.arrays[0].dims), len(self.dims("lhs_batch_dims"))
        left = len(self.left.arrays[0].dims) - len(self.dims("lhs_contracting_dims"))
        return (
            math.prod(parts(self.result, range(batch, left))),
            math.prod(parts(self.result, range(left, rank))),
        )


def cuts_the_batch_anew(dot: Dot) -> bool:
    """Whether a batch dimension that the operands shard over some devices is sharded, in the result, over
    those of the sum: its elements come out in another order.

    Not where the result has a copy for each part of the sum, or an own dimension of an operand in as
    many parts: XLA takes these for the sum instead. The other batch dimensions do not matter.
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


def sums_differently_cut_dims(dot: Dot) -> bool:
    """The operands agree on the cut of one summed dimension and disagree on that of others, into as
    many parts in all: only the latter are added up.

    Only where the result is whole: if it is cut, some come out right.
    """
    lhs, rhs = dot.summed
    same = [i for i, (left, right) in enumerate(zip(lhs, rhs)) if left == right > 1]
    if not same or lhs == rhs or math.prod(lhs) != math.prod(rhs) or dot.result.is_cut:
        return False
    left, right = dot.dims("lhs_contracting_dims"), dot.dims("rhs_contracting_dims")
    return places(dot.lhs, [left[i] for i in same]) == places(dot.rhs, [right[i] for i in same])


def adds_up_other_devices(dot: Dot) -> bool:
    """The left operand is cut along the sum alone, in copies, and the right one on the same devices
    further, along its own dimensions or the batch; so is the result. Copies are numbered in ascending
    order of devices, and the right one's rows have them in another.

    The devices that add up their sums are those whose copies have the same number. That is wrong where
    they hold different parts of the right operand. Only where the left operand is the smallest of the
    three: a larger one is not always the one that the others are brought in line with.
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
    if places(dot.lhs, dot.dims("lhs_contracting_dims")) != summed or not dot.result.is_cut:
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
    """The right operand is cut along the batch and the sum, the result along the batch and the left
    one's own dimension, in the same order of devices; the left one along its own dimension and the sum,
    with the devices of every part of the sum in another order, the same for all of them.

    The left operand is sent to be cut along the batch too, in its own order of devices, and the right
    one to fit it, but the result is taken to be in the order of the right one.
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
    """For each device the number of its part along some dimensions together."""
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
