"""Divides a sequence of layers into contiguous parts of similar cost."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.pipeline.cells import FeatureExtractionLayer, metas_in_sequence, sub_layers

Shape = Sequence[int]


class PartitionError(ValueError):
    """Raised for layers that cannot be divided into as many parts as asked for."""


@dataclass(frozen=True)
class Partition:
    """A sequence of costs, divided into contiguous parts."""

    # Part j has the elements from bounds[j] up to bounds[j + 1], which is not in it.
    bounds: tuple[int, ...]
    costs: tuple[int, ...]  # the cost of each part, e.g. in FLOPs

    @property
    def imbalance(self) -> float:
        """The largest cost of a part divided by their mean: 1 where all are equal."""
        total = sum(self.costs)
        return max(self.costs) * len(self.costs) / total if total else 1.0

    def Parts(self, items: Sequence) -> list[list]:
        """The items of each part."""
        return [list(items[a:b]) for a, b in pairwise(self.bounds)]


def histogram_partition(costs: Sequence[int], num_partitions: int) -> Partition:
    """GPipe's rule: element i goes to part `int(K * (costs[0] + ... + costs[i]) / total)`, at most K - 1.

    It needs one pass, but its parts can be far from equal, or empty.

    Raises:
        PartitionError: more parts than elements, or a part that would be empty.
    """
    _check_counts(costs, num_partitions)
    total = sum(costs)
    last = num_partitions - 1
    # In whole numbers, so that no rounding decides.
    parts = [min(c * num_partitions // total if total else 0, last) for c in accumulate(costs)]
    empty = [j for j in range(num_partitions) if j not in parts]
    if empty:
        raise PartitionError(
            f"num_partitions={num_partitions}: the histogram of costs gives part {empty[0]} no layer, since no sum of "
            "the costs up to a layer falls into it; use rule='optimal', or fewer partitions"
        )
    return _partition(costs, [parts.index(j) for j in range(num_partitions)])


def optimal_partition(costs: Sequence[int], num_partitions: int) -> Partition:
    """The contiguous parts whose largest cost is least; none is empty.

    Dynamic programming over (parts, elements). Of several such divisions, it is the one whose later parts begin first.

    Args, raises: as histogram_partition.
    """
    _check_counts(costs, num_partitions)
    count = len(costs)
    sums = [0, *accumulate(costs)]
    best: list[float] = [math.inf if i else 0 for i in range(count + 1)]
    starts: list[list[int]] = []
    for parts in range(1, num_partitions + 1):
        level, begins = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(parts, count + 1):
            for start in range(parts - 1, end):
                largest = max(best[start], sums[end] - sums[start])
                if largest < level[end]:
                    level[end], begins[end] = largest, start
        best = level
        starts.append(begins)
    bounds, end = [], count
    for begins in reversed(starts):
        end = begins[end]
        bounds.append(end)
    return _partition(costs, bounds[::-1])


def divided(costs: Sequence[int], num_partitions: int, ends: Sequence[int] = ()) -> Partition:
    """The parts that end where `ends` says, e.g. (2, 5) for two elements and then three; () for optimal_partition.

    Raises:
        PartitionError: as optimal_partition; or ends that are not an ascending number for each part.
    """
    if not ends:
        return optimal_partition(costs, num_partitions)
    starts = (0, *ends[:-1])
    ascending = all(start < end for start, end in zip(starts, ends, strict=True))
    if len(ends) != num_partitions or not ascending or ends[-1] != len(costs):
        raise PartitionError(
            f"splits={list(ends)}: must be {num_partitions} ascending numbers of layers, of which the last is all "
            f"{len(costs)}"
        )
    return _partition(costs, starts)


RULES: dict[str, Callable[[Sequence[int], int], Partition]] = {
    "histogram": histogram_partition,
    "optimal": optimal_partition,
}


def flattened(
    params: InstantiableParams | Sequence[InstantiableParams],
) -> list[InstantiableParams]:
    """The layers of a sequence, or of a list of them, with nested sequences opened."""
    if isinstance(params, (list, tuple)):
        return [layer for p in params for layer in flattened(p)]
    subs = sub_layers(params)  # type: ignore[arg-type]
    return [params.Copy()] if subs is None else flattened(subs)  # type: ignore[union-attr]


def PartitionSequentialLayers(
    params: InstantiableParams | Sequence[InstantiableParams],
    num_partitions: int,
    *shapes: Shape | None,
    rule: str = "histogram",
) -> list[InstantiableParams]:
    """Divides a sequence of layers into parts that cost roughly the same FLOPs for inputs of given shapes.

    Layers are named cell_000, cell_001, ... in the order of the sequence, the parts d0, d1, ...

    Args:
        params: Params of a layer that is a sequence (see `sub_layers`), or a list of Params.
        shapes: of the inputs of the first layer.
        rule: 'histogram' (GPipe's) or 'optimal' (the least largest part).

    Raises:
        PartitionError: more parts than layers, or a part that would be empty.
        ValueError: an unknown rule.
    """
    checks.check_one_of("PartitionSequentialLayers: rule", rule, RULES)
    layers = flattened(params)
    for i, layer in enumerate(layers):
        layer.name = f"cell_{i:03d}"
    partition = RULES[rule](_costs(layers, *shapes), num_partitions)
    return [
        FeatureExtractionLayer.Params().Set(name=f"d{j}", sub=part)
        for j, part in enumerate(partition.Parts(layers))
    ]


def partition_of(cells: Sequence[InstantiableParams], *shapes: Shape | None) -> Partition:
    """Finds the cost of each of some cells for inputs of given shapes, e.g. those of PartitionSequentialLayers."""
    return Partition(tuple(range(len(cells) + 1)), tuple(_costs(cells, *shapes)))


def _costs(layers: Sequence[InstantiableParams], *shapes: Shape | None) -> list[int]:
    return [meta.flops for meta in metas_in_sequence(layers, *shapes)]


def _check_counts(costs: Sequence[int], num_partitions: int) -> None:
    if num_partitions < 1:
        raise PartitionError(f"num_partitions={num_partitions}: must be an integer of at least 1")
    if num_partitions > len(costs):
        raise PartitionError(
            f"num_partitions={num_partitions}: there are only {len(costs)} layers; at most as many partitions"
        )


def _partition(costs: Sequence[int], starts: Sequence[int]) -> Partition:
    bounds = (*starts, len(costs))
    return Partition(bounds, tuple(sum(costs[a:b]) for a, b in pairwise(bounds)))
