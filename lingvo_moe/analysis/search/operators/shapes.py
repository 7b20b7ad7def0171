"""The rules of operations that move elements without computing: reshapes, transposes, slices, joins."""

import math
from typing import Any

from lingvo_moe.analysis.search.operators.rule import (
    Rule,
    RuleOf,
    dimension_of,
    known_shape,
    number_of,
    numbered,
    rule,
    whole,
    without,
)


def reshape(op: Any) -> Rule | None:
    """Joins or splits dimensions, of which the major one keeps its parts."""
    before, after = known_shape(op.inputs[0]), known_shape(op.outputs[0])
    inputs: list[str | None] = [None] * len(before)
    outputs: list[str | None] = [None] * len(after)
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
            inputs[major_in] = outputs[major_out] = str(major_in)
    return rule(op, [tuple(inputs)], [tuple(outputs)])


def transpose(op: Any) -> Rule | None:
    """Permutes dimensions."""
    order = number_of(op.inputs[1])
    if order is None:
        return None
    dims = numbered(op.inputs[0])
    return rule(op, [dims], [tuple(dims[int(i)] for i in order)])


def bitcast(op: Any) -> Rule | None:
    """The last dimension goes or comes where elements become wider or narrower; then it is whole."""
    dims, rank = numbered(op.inputs[0]), len(known_shape(op.outputs[0]))
    return rule(op, [whole(dims, rank)], [(*dims, None)[:rank]])


def _same_where_equal(op: Any) -> Rule | None:
    """Dimensions that keep their size keep their letters; those that change are whole."""
    before, after = known_shape(op.inputs[0]), known_shape(op.outputs[0])
    if len(before) != len(after):
        return None
    changed = (i for i, (n, m) in enumerate(zip(before, after)) if n != m)
    dims = whole(numbered(op.inputs[0]), *changed)
    return rule(op, [dims], [dims])


def strided_slice(op: Any) -> Rule | None:
    """Dimensions that are taken as they are keep their letters. Of the masks, an ellipsis has no rule."""
    if op.get_attr("ellipsis_mask"):
        return None
    begin, end, strides = (number_of(x) for x in op.inputs[1:4])
    if begin is None or end is None or strides is None:
        return None
    shape = known_shape(op.inputs[0])
    masks = {n: op.get_attr(f"{n}_mask") for n in ("begin", "end", "new_axis", "shrink_axis")}
    dims = list(numbered(op.inputs[0]))
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
    return rule(op, [tuple(dims)], [(*out, *dims[dim:])])


def concat(op: Any) -> Rule | None:
    """Tensors one behind the other along a dimension, which is whole."""
    axis = dimension_of(op.inputs[-1], op.outputs[0])
    if axis is None:
        return None
    dims = whole(numbered(op.outputs[0]), axis)
    return rule(op, [dims] * (len(op.inputs) - 1), [dims])


def split(op: Any) -> Rule | None:
    """Parts of a dimension, which is whole."""
    place, value = (0, 1) if op.type == "Split" else (2, 0)
    axis = dimension_of(op.inputs[place], op.inputs[value])
    if axis is None:
        return None
    dims = whole(numbered(op.inputs[value]), axis)
    return rule(op, [None, dims] if value else [dims], [dims])


def pack(op: Any) -> Rule | None:
    """A new dimension, which is whole."""
    dims = numbered(op.outputs[0])
    axis = op.get_attr("axis") % len(dims)
    return rule(op, [without(dims, axis)] * len(op.inputs), [whole(dims, axis)])


def unpack(op: Any) -> Rule | None:
    """A dimension, which is whole, is taken apart."""
    dims = numbered(op.inputs[0])
    axis = op.get_attr("axis") % len(dims)
    return rule(op, [whole(dims, axis)], [without(dims, axis)])


RULES: dict[str, RuleOf] = {
    **dict.fromkeys(("ExpandDims", "Reshape", "Squeeze"), reshape),
    "Transpose": transpose,
    "Bitcast": bitcast,
    **dict.fromkeys(("MirrorPad", "Pad", "PadV2", "Slice", "Tile"), _same_where_equal),
    "StridedSlice": strided_slice,
    "ConcatV2": concat,
    **dict.fromkeys(("Split", "SplitV"), split),
    "Pack": pack,
    "Unpack": unpack,
}
