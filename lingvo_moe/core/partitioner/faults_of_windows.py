"""Which operations over windows XLA's SPMD partitioner (that of jaxlib 0.10.2) gets wrong.

They are the gradients of convolutions by their kernels and of max pooling, where dimensions over which
the windows go are cut. Each function says when, from the window and from how the operands are cut.
"""

from collections.abc import Sequence

from lingvo_moe.core.hlo.attributes import WindowDim, convolution_dims, window
from lingvo_moe.core.hlo.module import Instruction
from lingvo_moe.core.hlo.sharding import TensorSharding
from lingvo_moe.core.partitioner.faults_of_products import parts


class Convolution:
    """A convolution whose operands are both cut, and what each dimension of it is.

    In the gradient by a kernel the cut image is the left operand and the result's gradient, which is
    the window, the right one: features of the input stand where a batch does, the batch where the
    features do that are summed.
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
        """The operand that the other one is cut as: the larger one, the left one of two alike."""
        left, right = self._operands
        return 1 if left.arrays[0].num_bytes < right.arrays[0].num_bytes else 0

    def _cut_windows(self) -> list[int]:
        """The dimensions that the operands are cut along, by number, and that are of windows: of one
        that ends where the image does, once, only the sum is left."""
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
        """How many devices hold a part of the operand that the other one is cut as."""
        return self._cut.copies

    def AddsUpCopies(self) -> bool:
        """Each device has a part of a sum over the cut windows, and these are added up over all
        devices, also where several hold the same part.

        Where the summed features (the batch, in a gradient) are cut in both operands too, devices are
        grouped by them first; then only if no other dimension of the operands is cut. In groups, as
        those of a depthwise convolution's gradient, it is so also where the batch alone is cut.
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
        if not self._exchanges():
            return False
        if min(summed) > 1:
            alike = (
                self._lhs.copies == self._rhs.copies and summed[0] == summed[1] and max(own) == 1
            )
            left, right = parts(self._lhs, self._left), parts(self._rhs, self._right)
            return alike and (left == right or max(right) > 1)
        return own[self._reference] == 1

    def LosesBatch(self) -> bool:
        """Whether the kernel, larger than the image, is sharded along the summed features and has a copy
        for each part of the batch, while the image is sharded along the batch and the windows: the image
        is sharded as the kernel, and parts of the batch are lost.
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
        """Whether the left operand's parts are close enough to their windows that they are exchanged:
        else something is gathered, and right."""
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
        """The last window of a strided convolution lies in padding alone, the last of the parts has no
        windows, and the windows of a part go over two parts of the image: the last part that has
        windows begins so far behind its part of the image that it reads what it does not have.

        Padding "SAME" and "VALID" have no such window. That this is all is only known from trials.
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
    """The elements that some part of the image needs from before it, and from behind it, in a sum over
    the window's parts; `left` and `right` are the sizes of parts, `results` those of a window."""
    step = left - right * w.rhs_dilate
    before = max(step * i + w.pad_low for i in range(1, count))
    reach = 1 - w.rhs_dilate + w.stride * (results - 1) - w.pad_low
    after = max(reach - step * (i + 1) for i in range(count - 1))
    return before, after


def overlaps_by_its_stride(instruction: Instruction, sharding: TensorSharding) -> bool:
    """Whether a select-and-scatter's windows reach over two of its strides, without the padding before
    the first one, along a dimension that the result is cut along: then its first part is from one
    element off. Windows larger than a part are left out: of those some come out right."""
    return any(
        count > 1 and 2 * w.stride <= w.size - w.pad_low and w.size <= -(-size // count)
        for count, size, w in zip(sharding.tiles, instruction.arrays[0].dims, window(instruction))
    )
