"""Detects operations over windows that XLA's SPMD partitioner (of jaxlib 0.10.2) computes wrongly.

These are gradients of convolutions by their kernels, and of max pooling, if the windows' dimensions are
sharded. Each function detects a fault from the window and the shardings of the operands.
"""

import math
from collections.abc import Sequence

from lingvo_moe.core.hlo.attributes import WindowDim, convolution_dims, window
from lingvo_moe.core.hlo.module import Instruction
from lingvo_moe.core.hlo.sharding import TensorSharding
from lingvo_moe.core.partitioner.faults_of_products import parts


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
        self._lhs, self._rhs = shardings
        dims = convolution_dims(instruction)
        self._own = (dims.lhs["b"], dims.rhs["o"])
        self._summed = (dims.lhs["f"], dims.rhs["i"])
        labels = sorted(label for label in dims.lhs if label.isdigit())
        self._left = [dims.lhs[label] for label in labels]
        self._right = [dims.rhs[label] for label in labels]
        self._windows = window(instruction)
        self._counts = [instruction.arrays[0].dims[dims.output[label]] for label in labels]
        self._is_plain = "rhs_reversal" not in instruction.attributes and all(
            w.lhs_dilate == 1 for w in self._windows
        )
        self._has_feature_groups, self._has_batch_groups = (
            instruction.attribute(f"{what}_group_count") not in ("", "1")
            for what in ("feature", "batch")
        )

    @property
    def _reference(self) -> int:
        """Index of the operand whose sharding XLA imposes on the other: the larger one; the left one if equal."""
        left, right = self._operands
        return 1 if left.arrays[0].num_bytes < right.arrays[0].num_bytes else 0

    def _cut_windows(self) -> list[int]:
        """Indices of the window dimensions along which the reference operand is sharded.

        A window that covers the image exactly once does not count: it is only a sum.
        """
        dims, cut = (self._left, self._right)[self._reference], self._cut
        whole = [
            w.size == self._operands[0].arrays[0].dims[d]
            and count == 1
            and (w.pad_low, w.rhs_dilate) == (0, 1)
            for w, d, count in zip(self._windows, self._left, self._counts)
        ]
        found = [i for i, n in enumerate(parts(cut, dims)) if n > 1]
        return [i for i in found if not whole[i]]

    @property
    def _cut(self) -> TensorSharding:
        return (self._lhs, self._rhs)[self._reference]

    @property
    def copies(self) -> int:
        """How many devices hold each part of the reference operand, whose sharding XLA imposes on the other."""
        return self._cut.copies

    def AddsUpCopies(self) -> bool:
        """Whether XLA adds partial sums over all devices, although several devices hold the same part.

        The partial sums are those over sharded windows; the result is too large. If both operands also shard the
        summed features (in a gradient: the batch), XLA groups the devices by them first. Then the result is wrong only
        if no other dimension of the operands is sharded. With feature or batch groups, as in a depthwise convolution's
        gradient, it is also wrong if only the batch is sharded.
        """
        if not self._is_plain or self._cut.copies == 1:
            return False
        shardings = (self._lhs, self._rhs)
        summed = [parts(s, [d])[0] for s, d in zip(shardings, self._summed)]
        own = [parts(s, [d])[0] for s, d in zip(shardings, self._own)]
        if self._has_feature_groups or self._has_batch_groups:
            if own[self._reference] > 1:
                return False
            if self._has_feature_groups:
                per_group = self._operands[1].arrays[0].dims[self._summed[1]]
                return per_group == 1 == summed[self._reference] and self._exchanges()
            if self._cut_windows():
                return self._exchanges()
            return min(summed) > 1 or max(parts(self._lhs, self._left)) > 1
        if self._follows_copies(summed, own):
            return True
        if not self._exchanges():
            return False
        if min(summed) > 1:
            alike = (
                self._lhs.copies == self._rhs.copies and summed[0] == summed[1] and max(own) == 1
            )
            left, right = parts(self._lhs, self._left), parts(self._rhs, self._right)
            return alike and (left == right or max(right) > 1)
        return own[self._reference] == 1

    def _follows_copies(self, summed: Sequence[int], own: Sequence[int]) -> bool:
        """Whether XLA reshards the image like the window, and then adds the copies.

        The image is sharded along the summed features alone. The window is sharded along rows or columns, into as many
        parts and with as many copies of each.

        Args:
            summed: into how many parts (image, window) shard the summed features.
            own: into how many parts the image's batch and the window's output features are sharded.
        """
        left, right = parts(self._lhs, self._left), parts(self._rhs, self._right)
        return (
            summed[0] > 1 == summed[1]
            and max(own) == 1
            and max(left) == 1
            and math.prod(right) == summed[0]
            and self._lhs.copies == self._rhs.copies
            and max(self._counts) > 1
        )

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
            and not (self._has_feature_groups or self._has_batch_groups)
            and all(count == 1 for count in self._counts)
            and left != right
            and math.prod(left) == math.prod(right)
            and any(a == b > 1 for a, b in zip(left, right))
        )

    def LosesBatch(self) -> bool:
        """Whether parts of the batch are lost, since XLA reshards the image like the kernel, which is larger.

        The kernel is sharded along the summed features and has at least one copy for each part of the batch. The image
        is sharded along the batch and the windows' dimensions.
        """
        summed = parts(self._lhs, [self._summed[0]])[0], parts(self._rhs, [self._summed[1]])[0]
        return (
            self._is_plain
            and not (self._has_feature_groups or self._has_batch_groups)
            and self._reference == 1
            and summed[0] == 1 < summed[1]
            and max(parts(self._lhs, self._left)) > 1
            and 1 < parts(self._lhs, [self._own[0]])[0] <= self._rhs.copies
        )

    def _exchanges(self) -> bool:
        """Whether XLA does a halo exchange: each part of the left operand is close enough to its windows.

        Otherwise XLA gathers an operand, and the result is right.
        """
        cut = self._cut_windows()
        if not cut:
            return False
        dims = (self._left, self._right)[self._reference]
        for i in cut:
            count = parts(self._cut, [dims[i]])[0]
            before, after = _halos(
                self._windows[i], *self._part_sizes(i, count), self._counts[i], count
            )
            size = self._part_sizes(i, count)[0]
            parts_away = -(-max(before, 0) // size) - (-max(after, 0) // size)
            if self._windows[i].size < count or parts_away >= max(count, 3):
                return False
        return True

    def _part_sizes(self, i: int, count: int) -> tuple[int, int]:
        left = self._operands[0].arrays[0].dims[self._left[i]]
        right = self._operands[1].arrays[0].dims[self._right[i]]
        return -(-left // count), -(-right // count)

    def SkipsPadding(self) -> bool:
        """Whether a part's windows read out of range.

        It happens if the last window of a strided convolution covers only padding, the last part has no
        windows, and the windows of one part cover two parts of the image. For the last part with windows,
        its first window starts past its own shard, so it reads out of range. Padding "SAME" and "VALID"
        have no such window. The condition was found by trials.
        """
        if not self._is_plain or self._has_feature_groups or self._has_batch_groups:
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
                in_padding >= self._operands[0].arrays[0].dims[self._left[i]]
                and last < count - 1
                and windows * w.rhs_dilate == 2 * size
                and begin - self._counts[i] > (last + 1) * size
            ):
                return True
        return False


def _halos(w: WindowDim, left: int, right: int, results: int, count: int) -> tuple[int, int]:
    """Returns the largest halos, in elements (before, after), that a part of the image needs.

    The convolution is a sum over the window's parts.

    Args:
        w: the window dimension.
        left, right: the sizes of a part of the image and of the window.
        results: the number of results along the dimension.
        count: the number of parts.
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
