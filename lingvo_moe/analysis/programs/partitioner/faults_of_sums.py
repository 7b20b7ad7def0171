"""Detects matrix products whose sum XLA's SPMD partitioner (of jaxlib 0.10.2) scatters to the wrong devices.

For a product whose summed dimensions are sharded, the partitioner groups the devices: a group has those with the same
part of the sum. Each group computes a product of its own, the groups' results are added, and if the result is sharded
over the devices of the sum, each group then keeps its slice of that sum. Two things can go wrong here, if the sum
comes first (`Sum` says when):

- The devices of a group are numbered as the larger operand orders them, and the result is taken to have that order.
- The slice is taken along a dimension that is already sharded within the group.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding
from lingvo_moe.analysis.programs.partitioner.faults_of_products import (
    Dot,
    part_bytes,
    parts,
    places,
)


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum over devices of a product."""

    dot: Dot  # the product
    # For each part of the sum, its devices in the order of the larger operand.
    groups: tuple[tuple[int, ...], ...]
    # Whether both operands have the same devices for each part. Otherwise XLA reshards the smaller one.
    is_agreed: bool

    @functools.cached_property
    def sliced(self) -> tuple[int, ...] | None:
        """The dimensions of the result along which each group keeps its slice, as the partitioner searches them.

        It compares two devices of the first group only. None if it finds none.
        """
        result, count = self.dot.result, len(self.groups)
        if not result.is_sharded or len(self.groups[0]) == 1:
            return None
        where = _with_copies(result)
        first, second, *_ = (where[device] for device in self.groups[0])
        alike = [d for d, index in enumerate(first) if index == second[d]]
        if math.prod((*result.tiles, result.copies)[d] for d in alike) != count:
            return None
        if any(len({where[device][d] for device in g}) > 1 for g in self.groups for d in alike):
            return None
        return tuple(d for d in alike if (*result.tiles, result.copies)[d] > 1)

    def ExchangesParts(self) -> bool:
        """Whether XLA exchanges parts of the result, since a group numbers its devices in another order.

        False if XLA may group the devices by other dimensions before it groups them by the sum: whether it does is a
        question of costs.
        """
        if not self.sliced or self._CanComeLater() or self._NestsInOperand():
            return False
        where = _with_copies(self.dot.result)
        rest = [d for d in range(len(self.dot.result.tiles)) if d not in self.sliced]
        orders = {
            tuple(tuple(where[device][d] for d in rest) for device in group)
            for group in self.groups
        }
        return len(orders) == 1 and any(list(indices) != sorted(indices) for indices in orders)

    def ReshardsBatch(self) -> bool:
        """Whether XLA returns the elements of a batch dimension in a wrong order.

        Both operands shard the batch dimension over some devices, and the slices are taken along it. Other batch
        dimensions do not matter. False if the result shards a free dimension of an operand into as many parts as the
        sum has: XLA then takes the slices along it.
        """
        dot, count = self.dot, len(self.groups)
        lhs, rhs = dot.dims("lhs_batch_dims"), dot.dims("rhs_batch_dims")
        result = parts(dot.result, range(len(lhs)))
        if not self.is_agreed or places(dot.lhs, lhs) != places(dot.rhs, rhs):
            return False
        if self._GroupsBatch():
            return False
        if count in dot.own:
            return False
        sliced = self.sliced
        if sliced is None:
            sliced = tuple(range(len(lhs))) if math.prod(result) == count else ()
        return any(
            before > 1 and result[i] == count and i in sliced
            for i, before in enumerate(parts(dot.lhs, lhs))
        )

    def _GroupsBatch(self) -> bool:
        """Whether the operands shard the batch alike, and the result shards it into as many parts."""
        dot = self.dot
        left, right, result = dot.batch
        dims = dot.dims("lhs_batch_dims"), dot.dims("rhs_batch_dims")
        is_same = left == right == result > 1
        return is_same and places(dot.lhs, dims[0]) == places(dot.rhs, dims[1])

    def _CanComeLater(self) -> bool:
        """Whether the devices can be grouped by batch or free dimensions as they are.

        If the operands do not agree on the sum, whether they can be resharded so.
        """
        if not self.is_agreed:
            left, right, result = self.dot.batch
            return bool(self._MatchedDims()) or 1 < result in (left, right)
        if self._GroupsBatch():
            return True
        return any(
            places(sharding, dims) == places(self.dot.result, of_result)
            for sharding, dims, of_result in self._MatchedDims()
        )

    def _MatchedDims(self) -> Sequence[tuple[TensorSharding, Sequence[int], Sequence[int]]]:
        """(sharding, dimensions, the result's): free dimensions with as many parts in an operand as in the result."""
        dot = self.dot
        pairs = [(dot.lhs, *dot.free[0]), (dot.rhs, *dot.free[1])]
        counts = [(parts(s, dims), parts(dot.result, to)) for s, dims, to in pairs]
        equal = [
            pair
            for pair, (n, m) in zip(pairs, counts, strict=True)
            if math.prod(n) == math.prod(m) > 1
        ]
        if equal:
            return equal
        for (sharding, dims, to), (n, m) in zip(pairs, counts, strict=True):
            same = [i for i, count in enumerate(n) if count == m[i] > 1]
            if same:
                return [(sharding, [dims[i] for i in same], [to[i] for i in same])]
        return []

    def _NestsInOperand(self) -> bool:
        """Whether one operand is sharded along the sum alone, and each part of the result lies in one of the other's.

        XLA then shards the result like that operand first.
        """
        dot = self.dot
        is_sum = [math.prod(sharding.tiles) == len(self.groups) for sharding in (dot.lhs, dot.rhs)]
        if is_sum[0] == is_sum[1]:
            return False
        operand, (dims, to) = (dot.rhs, dot.kept[1]) if is_sum[0] else (dot.lhs, dot.kept[0])
        outer, inner = places(operand, dims), places(dot.result, to)
        ratios = [m / n for n, m in zip(parts(operand, dims), parts(dot.result, to), strict=True)]
        return all(
            ratio.is_integer() and inner[device][i] // int(ratio) == outer[device][i]
            for device in outer
            for i, ratio in enumerate(ratios)
        )


def sum_of(dot: Dot) -> Sum | None:
    """Returns the sum over devices of a product.

    None if there is none, if the operands have different numbers of parts, or if the result has a copy for each part
    of the sum: then there is nothing to slice.
    """
    left, right = dot.dims("lhs_contracting_dims"), dot.dims("rhs_contracting_dims")
    lhs, rhs = dot.summed
    if math.prod(lhs) != math.prod(rhs):
        alike = [i for i, count in enumerate(lhs) if count == rhs[i] > 1]
        left, right = tuple(left[i] for i in alike), tuple(right[i] for i in alike)
    elif lhs != rhs:
        return None
    count = math.prod(parts(dot.lhs, left))
    if count == 1 or dot.result.copies % count == 0:
        return None
    groups, others = _groups(dot.lhs, left), _groups(dot.rhs, right)
    is_agreed = set(map(frozenset, groups)) == set(map(frozenset, others))
    is_left = part_bytes(dot.left, dot.lhs) > part_bytes(dot.right, dot.rhs)
    return Sum(dot, groups if is_left else others, is_agreed)


def _groups(sharding: TensorSharding, dims: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The devices of each part along `dims`, in the sharding's order."""
    where = places(sharding, dims)
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in sharding.devices:
        groups.setdefault(where[device], []).append(device)
    return tuple(map(tuple, groups.values()))


def _with_copies(sharding: TensorSharding) -> dict[int, tuple[int, ...]]:
    """Maps each device to the indices of its part, and to its number among the copies of that part."""
    numbered: dict[int, tuple[int, ...]] = {}
    seen: dict[tuple[int, ...], int] = {}
    for device, index in places(sharding, range(len(sharding.tiles))).items():
        seen[index] = seen.get(index, -1) + 1
        numbered[device] = (*index, seen[index])
    return numbered
