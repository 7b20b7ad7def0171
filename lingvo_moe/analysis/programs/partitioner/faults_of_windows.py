"""Detects operations over windows that XLA's SPMD partitioner (of jaxlib 0.10.2) computes wrongly.

These are gradients of convolutions by their kernels, and of max pooling, if the windows' dimensions are
sharded, and padding between elements. Each function detects a fault from the window and the shardings of the operands.
"""

import math
from collections.abc import Sequence

from lingvo_moe.analysis.programs.hlo.attributes import WindowDim, convolution_dims, window
from lingvo_moe.analysis.programs.hlo.instructions import Instruction
from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding
from lingvo_moe.analysis.programs.partitioner.faults_of_products import parts, places


class Convolution:
    """A convolution whose operands are both sharded, and the roles of their dimensions.

    Names are those of a forward convolution. The left operand is the image, the right one the window (the kernel). The
    summed features are the input features; an operand's own dimension is the image's batch or the window's output
    features. In the gradient by a kernel the right operand is the gradient of the result. There the input's features
    take the place of the batch, and the batch that of the summed features.
    """

    def __init__(
        self,
        instruction: Instruction,
        operands: Sequence[Instruction],
        shardings: Sequence[TensorSharding],
    ):
        self._operands = operands
        self._lhs, self._rhs, self._result = shardings
        dims = convolution_dims(instruction)
        self._own = (dims.lhs["b"], dims.rhs["o"])
        self._summed = (dims.lhs["f"], dims.rhs["i"])
        labels = sorted(label for label in dims.lhs if label.isdigit())
        self._left = [dims.lhs[label] for label in labels]
        self._right = [dims.rhs[label] for label in labels]
        self._windows = window(instruction)
        self._sizes = [operands[0].arrays[0].dims[d] for d in self._left]
        self._of_own = (dims.output["b"], dims.output["f"])
        self._outer = [dims.output[label] for label in labels]
        self._counts = [instruction.arrays[0].dims[dims.output[label]] for label in labels]
        self._is_plain = "rhs_reversal" not in instruction.attributes and all(
            w.lhs_dilate == 1 for w in self._windows
        )
        self._feature_groups, self._batch_groups = (
            int(instruction.attribute(f"{what}_group_count") or 1) for what in ("feature", "batch")
        )

    @property
    def _reference(self) -> int:
        """Index of the operand whose sharding XLA imposes on the other: the larger one; the left one if equal."""
        left, right = self._operands
        return 1 if left.arrays[0].num_bytes < right.arrays[0].num_bytes else 0

    @property
    def _has_groups(self) -> bool:
        return max(self._feature_groups, self._batch_groups) > 1

    @property
    def _sums(self) -> list[int]:
        """Indices of the window dimensions whose window covers the image exactly once: they are only sums."""
        return [
            i
            for i, w in enumerate(self._windows)
            if (w.size, w.pad_low, w.rhs_dilate) == (self._sizes[i], 0, 1) and self._counts[i] == 1
        ]

    @property
    def _convolved(self) -> list[int]:
        """Indices of the window dimensions that are no sums, and whose windows have several elements or a stride."""
        return [
            i
            for i, w in enumerate(self._windows)
            if i not in self._sums
            and (w.size, w.pad_low, self._counts[i]) != (1, 0, self._sizes[i])
        ]

    def _cut_windows(self) -> list[int]:
        """Indices of the window dimensions along which the reference operand is sharded, but for sums."""
        dims, cut = (self._left, self._right)[self._reference], self._cut
        sharded = [i for i, n in enumerate(parts(cut, dims)) if n > 1]
        return [i for i in sharded if i not in self._sums]

    @property
    def _cut(self) -> TensorSharding:
        return (self._lhs, self._rhs)[self._reference]

    @property
    def copies(self) -> int:
        """The number of devices with each part of the reference operand, whose sharding XLA imposes on the other."""
        return self._cut.copies

    def AddsUpCopies(self) -> bool:
        """Whether XLA adds partial sums over all devices, although several devices hold the same part.

        XLA shards both operands like the reference operand, and each device sums over its part; the result is too
        large. It does so if the windows' dimensions of any of the three tensors are sharded, or with feature or batch
        groups, as in a depthwise convolution; mostly not if the reference operand's own dimension is sharded.

        If both operands shard the summed features (in a gradient: the batch), XLA groups the devices by them first, and
        adds the copies within a group. It may group the devices by an operand's own dimension next if the result shards
        it alike, and then add no copies; such a convolution is not reported.
        """
        if not self._is_plain or self._cut.copies == 1 or not self._exchanges():
            return False
        counts = [parts(s, [d])[0] for s, d in zip((self._lhs, self._rhs), self._own)]
        is_alone = counts[self._reference] == 1  # Whether XLA may shard the other operand alike.
        if self._has_groups:
            return self._adds_in_groups() if is_alone else self._adds_within_groups(counts)
        sides = ((self._lhs, self._left), (self._rhs, self._right))
        windows = [parts(s, [dims[i] for i in self._convolved]) for s, dims in sides]
        outer = parts(self._result, [self._outer[i] for i in self._convolved])
        if max((*windows[0], *windows[1], *outer), default=1) == 1:
            return False
        summed = [
            math.prod(parts(s, [d, *(dims[i] for i in self._sums)]))
            for (s, dims), d in zip(sides, self._summed)
        ]
        if min(summed) > 1:
            rest = [math.prod(s.tiles) // n for (s, _), n in zip(sides, summed)]
            wanted = [parts(self._result, [d])[0] for d in self._of_own]
            is_next = all(n != count or n == 1 for n, count in zip(counts, wanted))
            return is_alone and summed[0] == summed[1] and min(rest) > 1 and is_next
        return is_alone or (summed[self._reference] == 1 and self._adds_within_own(counts))

    def _adds_within_own(self, counts: Sequence[int]) -> bool:
        """Whether XLA first groups the devices by the reference operand's own dimension, which the result shards alike.

        Within a group that operand's own dimension is no longer sharded. It has to be the larger operand there too.
        False if the result is not sharded along the other operand's own dimension, or that operand over all devices:
        many of those are right.

        Args:
            counts: into how many parts each operand shards its own dimension.
        """
        at, other = self._reference, 1 - self._reference
        wanted = [parts(self._result, [d])[0] for d in self._of_own]
        size, beside = (self._operands[i].arrays[0].num_bytes for i in (at, other))
        return (
            counts[at] == wanted[at]
            and wanted[other] > 1
            and (self._lhs, self._rhs)[other].copies > 1
            and size // counts[at] > beside
        )

    def _adds_within_groups(self, counts: Sequence[int]) -> bool:
        """Whether XLA first groups the devices by the batch groups, which reference operand and result shard."""
        count, beside = counts[self._reference], counts[1 - self._reference]
        sides = (self._lhs, self._rhs)
        other = sides[1 - self._reference]
        return (
            self._batch_groups > 1
            and parts(self._result, [self._of_own[1]])[0] == count
            and (beside == count or (beside == 1 and other.copies % count == 0))
            and all(math.prod(s.tiles) > n for s, n in zip(sides, counts))
        )

    def _adds_in_groups(self) -> bool:
        """Whether XLA shards a convolution with feature or batch groups like the reference operand.

        Not if the groups are sharded over all devices: then each device computes its groups.
        """
        devices = len(self._cut.devices)
        of_groups = (self._own[0], self._summed[0])[self._feature_groups > 1]
        over_all = devices in (*parts(self._lhs, [of_groups]), *parts(self._rhs, [self._own[1]]))
        if over_all and max(self._feature_groups, self._batch_groups) % devices == 0:
            return False
        if self._batch_groups > 1:
            return True
        per_group = self._operands[1].arrays[0].dims[self._summed[1]]
        return per_group == 1 == parts(self._cut, [self._summed[self._reference]])[0]

    def SumsDifferentlyCutDims(self) -> bool:
        """Whether XLA leaves out partial sums: it adds them along only some of the sharded summed dimensions.

        This is the fault of `faults_of_products.sums_differently_sharded_dims`, in a convolution that is a matrix
        product because each window covers the complete image. The summed dimensions are rows, columns and features.
        The operands shard one of them into the same number of parts, and another one into different numbers. The
        product of the numbers of parts is the same for both.
        """
        left = parts(self._lhs, [self._summed[0], *self._left])
        right = parts(self._rhs, [self._summed[1], *self._right])
        return (
            self._is_plain
            and not self._has_groups
            and all(count == 1 for count in self._counts)
            and left != right
            and math.prod(left) == math.prod(right)
            and any(a == b > 1 for a, b in zip(left, right))
        )

    def ShardsGroups(self) -> bool:
        """Whether XLA shards the channels of the image alone in a depthwise kernel's gradient.

        It does so if the result is sharded along its dimension of one element. XLA takes that for a sharding of the
        left operand's batch, and there the channels are. False if both operands are sharded beside the channels: XLA
        then sums over their parts.
        """
        is_depthwise = self._batch_groups == self._operands[0].arrays[0].dims[self._own[0]]
        if not is_depthwise or parts(self._result, [self._of_own[0]])[0] == 1:
            return False
        groups = parts(self._result, [self._of_own[1]])[0]
        sides = (self._lhs, self._rhs)
        counts = [parts(s, [d])[0] for s, d in zip(sides, self._own)]
        beside = [s.is_sharded and math.prod(s.tiles) > n for s, n in zip(sides, counts)]
        fits = (n == groups or (n == 1 and s.copies % groups == 0) for s, n in zip(sides, counts))
        is_known = all(fits) and max(counts) == groups
        return is_known and not (all(beside) and self._exchanges())

    def _exchanges(self) -> bool:
        """Whether each part of the left operand is close enough to its windows for a halo exchange.

        Otherwise XLA gathers an operand, and the result is right. True also if there is nothing to exchange.
        """
        dims = (self._left, self._right)[self._reference]
        for i in self._cut_windows():
            count = parts(self._cut, [dims[i]])[0]
            before, after = _halos(
                self._windows[i], *self._part_sizes(i, count), self._counts[i], count
            )
            size = self._part_sizes(i, count)[0]
            parts_away = -(-max(before, 0) // size) - (-max(after, 0) // size)
            if parts_away > 2:
                return False
        return True

    def _part_sizes(self, i: int, count: int) -> tuple[int, int]:
        left = self._sizes[i]
        right = self._operands[1].arrays[0].dims[self._right[i]]
        return -(-left // count), -(-right // count)

    def SkipsPadding(self) -> bool:
        """Whether a part's windows read out of range.

        It happens if the last window of a strided convolution covers only padding, the last part has no
        windows, and the windows of one part cover two parts of the image. For the last part with windows,
        its first window starts past its own shard, so it reads out of range. Padding "SAME" and "VALID"
        have no such window. The condition was found by trials.
        """
        if not self._is_plain or self._has_groups:
            return False
        for i in self._cut_windows():
            w, count = self._windows[i], parts(self._lhs, [self._left[i]])[0]
            if count == 1 or count != parts(self._rhs, [self._right[i]])[0] or w.rhs_dilate == 1:
                continue
            size, windows = self._part_sizes(i, count)
            last = (w.size - 1) // windows
            in_padding = (w.size - 1) * w.rhs_dilate - w.pad_low
            begin = last * windows * w.rhs_dilate - w.pad_low
            if (
                in_padding >= self._sizes[i]
                and last < count - 1
                and windows * w.rhs_dilate == 2 * size
                and begin - self._counts[i] > (last + 1) * size
            ):
                return True
        return False


def _halos(w: WindowDim, left: int, right: int, results: int, count: int) -> tuple[int, int]:
    """Returns the largest halos, in elements (before, after), that a part of the image needs.

    The convolution is a sum over the window's parts.
    """
    step = left - right * w.rhs_dilate
    before = max(step * i + w.pad_low for i in range(1, count))
    reach = 1 - w.rhs_dilate + w.stride * (results - 1) - w.pad_low
    after = max(reach - step * (i + 1) for i in range(count - 1))
    return before, after


def overlaps_by_its_stride(instruction: Instruction, sharding: TensorSharding) -> bool:
    """Whether the gradient of max pooling (select-and-scatter) is off by one element in the first part.

    It is, if the windows without their low padding span at least two strides along a sharded dimension of the result.

    Windows larger than a part are not reported: some of those are right.
    """
    return any(
        count > 1 and 2 * w.stride <= w.size - w.pad_low and w.size <= -(-size // count)
        for count, size, w in zip(sharding.tiles, instruction.arrays[0].dims, window(instruction))
    )


def spread_dim(
    instruction: Instruction, operand: Instruction, before: TensorSharding, after: TensorSharding
) -> int | None:
    """Returns a dimension of a Pad whose padding between elements XLA gets wrong; None if there is none.

    The result is sharded along it and the operand is not; the operand is replicated, or its sharded dimensions are
    neither padded nor sharded differently in the result.
    """
    sizes = operand.arrays[0].dims
    padding = [
        tuple(map(int, dim.split("_"))) for dim in instruction.attribute("padding").split("x")
    ]
    for dim, (size, (low, _, *interior)) in enumerate(zip(sizes, padding, strict=True)):
        if not any(interior) or (size == 1 and low == 0):
            continue
        if parts(before, [dim]) != (1,) or parts(after, [dim]) == (1,):
            continue
        others = [d for d in range(len(sizes)) if d != dim]
        if not before.is_sharded or (
            places(before, others) == places(after, others)
            and not any(any(padding[d]) for d in others if before.tiles[d] > 1)
        ):
            return dim
    return None
