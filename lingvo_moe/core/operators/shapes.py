"""The rules of operations that move elements without computing: reshapes, transposes, slices, joins."""

import math
from typing import Any

from lingvo_moe.core.operators.rule import (
    Dims,
    Rule,
    RuleOf,
    number_of,
    numbered,
    shape_of,
    sizes_of,
    whole,
    without,
)


def reshape(op: Any) -> Rule | None:
    """Joins or splits dimensions, of which the major one keeps its parts."""
    before, after = shape_of(op.inputs[0]), shape_of(op.outputs[0])
    inputs: list[str | None] = [None] * len(before)
    outputs: list[str | None] = [None] * len(after)
    sizes: dict[str, int] = {}
    if math.prod(before) != math.prod(after) or not math.prod(before):
        return None
    i = j = 0
    while i < len(before) and j < len(after):
        first, second = i, j
        left, right = before[i], after[j]
        while left != right:
            if left < right:
                i += 1
                left *= before[i]
            else:
                j += 1
                right *= after[j]
        i, j = i + 1, j + 1
        # Ones before the major dimension are no part of it.
        major_in = next((k for k in range(first, i) if before[k] > 1), None)
        major_out = next((k for k in range(second, j) if after[k] > 1), None)
        if major_in is None or major_out is None:
            continue
        size = math.gcd(before[major_in], after[major_out])
        if size in (before[major_in], after[major_out]):
            letter = str(major_in)
            inputs[major_in] = outputs[major_out] = letter
            sizes[letter] = size
    return Rule((tuple(inputs), *(None,) * (len(op.inputs) - 1)), (tuple(outputs),), sizes)


def transpose(op: Any) -> Rule | None:
    """Permutes dimensions."""
    order = number_of(op.inputs[1])
    if order is None:
        return None
    shape = shape_of(op.inputs[0])
    dims = numbered(shape)
    out = tuple(dims[int(i)] for i in order)
    return Rule((dims, None), (out,), sizes_of((dims, shape)))


def _same_where_equal(op: Any) -> Rule | None:
    """Dimensions that keep their size keep their letters; those that change are whole."""
    before, after = shape_of(op.inputs[0]), shape_of(op.outputs[0])
    if len(before) != len(after):
        return None
    dims: Dims = tuple(
        d if n == m else None for d, n, m in zip(numbered(before), before, after, strict=True)
    )
    rest = (None,) * (len(op.inputs) - 1)
    return Rule((dims, *rest), (dims,) * len(op.outputs), sizes_of((dims, before)))


def strided_slice(op: Any) -> Rule | None:
    """Dimensions that are taken as they are keep their letters. Of the masks, an ellipsis has no rule."""
    if op.get_attr("ellipsis_mask"):
        return None
    begin, end, strides = (number_of(x) for x in op.inputs[1:4])
    if begin is None or end is None or strides is None:
        return None
    shape = shape_of(op.inputs[0])
    masks = {n: op.get_attr(f"{n}_mask") for n in ("begin", "end", "new_axis", "shrink_axis")}
    dims = list(numbered(shape))
    out: list[str | None] = []
    dim = 0
    for i in range(len(begin)):
        bit = 1 << i
        if masks["new_axis"] & bit:
            out.append(None)
            continue
        if masks["shrink_axis"] & bit:
            dims[dim] = None
        else:
            first = 0 if masks["begin"] & bit else int(begin[i])
            last = shape[dim] if masks["end"] & bit else int(end[i])
            if first != 0 or last < shape[dim] or int(strides[i]) != 1:
                dims[dim] = None
            out.append(dims[dim])
        dim += 1
    out += dims[dim:]
    rest = (None,) * 3
    return Rule((tuple(dims), *rest), (tuple(out),), sizes_of((tuple(dims), shape)))


def concat(op: Any) -> Rule | None:
    """Tensors one behind the other along a dimension, which is whole."""
    axis = number_of(op.inputs[-1])
    if axis is None:
        return None
    shape = shape_of(op.outputs[0])
    axis = int(axis) % len(shape)
    dims = whole(numbered(shape), axis)
    count = len(op.inputs) - 1
    return Rule(((dims,) * count) + (None,), (dims,), sizes_of((dims, shape)))


def split(op: Any) -> Rule | None:
    """Parts of a dimension, which is whole."""
    place = 0 if op.type == "Split" else 2
    axis = number_of(op.inputs[place])
    if axis is None:
        return None
    value = 1 if op.type == "Split" else 0
    shape = shape_of(op.inputs[value])
    axis = int(axis) % len(shape)
    dims = whole(numbered(shape), axis)
    inputs: list[Dims | None] = [None] * len(op.inputs)
    inputs[value] = dims
    return Rule(tuple(inputs), (dims,) * len(op.outputs), sizes_of((dims, shape)))


def pack(op: Any) -> Rule | None:
    """A new dimension, which is whole."""
    shape = shape_of(op.outputs[0])
    axis = op.get_attr("axis") % len(shape)
    dims = numbered(shape)
    out = whole(dims, axis)
    return Rule((without(dims, axis),) * len(op.inputs), (out,), sizes_of((out, shape)))


def unpack(op: Any) -> Rule | None:
    """A dimension, which is whole, is taken apart."""
    shape = shape_of(op.inputs[0])
    axis = op.get_attr("axis") % len(shape)
    dims = whole(numbered(shape), axis)
    return Rule((dims,), (without(dims, axis),) * len(op.outputs), sizes_of((dims, shape)))


RULES: dict[str, RuleOf] = {
    **dict.fromkeys(("ExpandDims", "Reshape", "Squeeze"), reshape),
    "Transpose": transpose,
    **dict.fromkeys(("MirrorPad", "Pad", "PadV2", "Slice", "Tile"), _same_where_equal),
    "StridedSlice": strided_slice,
    "ConcatV2": concat,
    **dict.fromkeys(("Split", "SplitV"), split),
    "Pack": pack,
    "Unpack": unpack,
}
