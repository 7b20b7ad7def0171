"""Divides a batch into micro-batches.

Letters: B batch, M micro-batches, D blocks of rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import tensorflow as tf

from lingvo_moe.core.config.checks import either
from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.sharding.annotate import sharded


class MicroBatchError(ValueError):
    """Raised for a batch that does not divide into the micro-batches that are asked for."""


def check_divides(num: int, sizes: Mapping[str, int], name: str) -> None:
    """Raises MicroBatchError unless the number of micro-batches divides all sizes.

    Args:
        num: M.
        name: the parameter that sets M, e.g. train.num_micro_batches.
        sizes: what is divided, by the path of its parameter, e.g. input.batch_size and task.num_groups.
    """
    if not any(size % num for size in sizes.values()):
        return
    common = math.gcd(*sizes.values())
    good = [n for n in range(1, common + 1) if common % n == 0]
    listing = " and ".join(f"{path}={size}" for path, size in sizes.items())
    raise MicroBatchError(
        f"{name}={num}: {listing} do{'es' if len(sizes) == 1 else ''} not divide into that many equal "
        f"parts; choose {either(good)}"
    )


@dataclass(frozen=True)
class Division:
    """The division of a batch into micro-batches.

    The rows are D equal blocks, and each block is M equal parts; micro-batch m has part m of every block. Where D is a
    multiple of the devices that shard the batch, no row changes its device. Where D divides the groups of a
    micro-batch, each group of the batch is a group of one micro-batch, with the same rows.
    """

    num: int  # M
    blocks: int  # D
    # The ArraySpecs of the batch, with `split`. Those whose first letter is B are divided; each micro-batch gets all
    # of the others.
    specs: NestedMap

    def Stacked(self, batch: NestedMap) -> NestedMap:
        """The batch with arrays [M, B/M, ...] in place of those that are divided."""
        return map_structure(self._Stack, batch, self.specs)

    def Part(self, stacked: NestedMap, i: tf.Tensor) -> NestedMap:
        """Micro-batch i (int32 scalar) out of Stacked's result."""

        def part(x: tf.Tensor, spec: ArraySpec) -> tf.Tensor:
            return sharded(tf.gather(x, i), spec.split) if spec.has_rows else x

        return map_structure(part, stacked, self.specs)

    def PartSpecs(self) -> NestedMap:
        """The ArraySpecs of a micro-batch."""

        def part(spec: ArraySpec) -> ArraySpec:
            if not spec.has_rows:
                return spec
            return replace(spec, shape=(spec.shape[0] // self.num, *spec.shape[1:]))

        return self.specs.Transform(part)

    def _Stack(self, x: tf.Tensor, spec: ArraySpec) -> tf.Tensor:
        if not spec.has_rows:
            return x
        rows, *rest = spec.shape
        by_rows, *splits = spec.split or [None] * len(spec.shape)
        shape = [self.blocks, self.num, rows // (self.blocks * self.num), *rest]
        x = sharded(tf.reshape(x, shape), (by_rows, None, None, *splits))
        x = tf.transpose(x, [1, 0, *range(2, len(shape))])
        x = sharded(x, (None, by_rows, None, *splits))
        return sharded(tf.reshape(x, [self.num, rows // self.num, *rest]), (None, *spec.split))


def num_rows(specs: NestedMap) -> int:
    """B, the rows of a batch of these ArraySpecs. Raises MicroBatchError: no array has rows, or they do not agree."""
    rows = {spec.shape[0] for spec in specs.Flatten() if spec.has_rows}
    if len(rows) != 1:
        raise MicroBatchError(
            "train.num_micro_batches: a batch is divided by its rows, so all of its arrays whose first letter is B "
            f"need the same number of rows; they have {sorted(rows)}"
        )
    return rows.pop()


def shares_of(units: NestedMap, batch: NestedMap) -> NestedMap:
    """A micro-batch's counts divided by the batch's (see BaseTask.Units), float32 scalars by name."""
    return NestedMap({name: n / tf.maximum(batch[name], 1.0) for name, n in units.items()})
