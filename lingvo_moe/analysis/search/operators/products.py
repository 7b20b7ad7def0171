"""The rules of operators of their own: products, convolutions, look-ups in tables."""

import math
from collections.abc import Iterable
from typing import Any

from lingvo_moe.analysis.search.operators.rule import (
    Rule,
    RuleOf,
    dimension_of,
    known_shape,
    numbered,
    rule,
    whole,
    without,
)


def matmul(op: Any) -> Rule | None:
    """[I, K] times [K, J], either of them maybe transposed."""
    first = "KI" if op.get_attr("transpose_a") else "IK"
    second = "JK" if op.get_attr("transpose_b") else "KJ"
    return _product(op, first, second, "IJ")


def batch_matmul(op: Any) -> Rule | None:
    """[..., I, K] times [..., K, J], whose leading dimensions are broadcast."""
    shapes = [known_shape(x) for x in op.inputs]
    rank = len(known_shape(op.outputs[0]))
    leading = [chr(ord("a") + i) for i in range(rank - 2)]
    first = "KI" if op.get_attr("adj_x") else "IK"
    second = "JK" if op.get_attr("adj_y") else "KJ"
    names = [
        "".join(leading[rank - len(shape) :]) + letters
        for shape, letters in zip(shapes, (first, second))
    ]
    return _product(op, names[0], names[1], "".join(leading) + "IJ")


def einsum_letters(op: Any) -> tuple[list[str], str]:
    """The letters of an einsum's operands and of its result; none of an equation without an arrow."""
    operands, arrow, result = op.get_attr("equation").decode().replace(" ", "").partition("->")
    return operands.split(",") if arrow else [], result


def product_flops(sizes: Iterable[int]) -> int:
    """Operations of a product that runs over dimensions of these sizes: two for each multiply-add."""
    return 2 * math.prod(sizes)


def einsum(op: Any) -> Rule | None:
    """One or two operands, no letter twice in one of them."""
    names, result = einsum_letters(op)
    if not names or "." in "".join(names) or len(names) > 2:
        return None
    if any(len(set(name)) != len(name) for name in (*names, result)):
        return None
    if len(names) == 2:
        return _product(op, names[0], names[1], result)
    return rule(op, [tuple(names[0])], [tuple(result)])


def _product(op: Any, first: str, second: str, result: str) -> Rule | None:
    sizes: dict[str, int] = {}
    for x, name in zip(op.inputs, (first, second), strict=True):
        for letter, size in zip(name, known_shape(x), strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    flops = product_flops(sizes.values())
    return rule(op, [tuple(first), tuple(second)], [tuple(result)], flops, heavy=True)


def convolution(op: Any) -> Rule | None:
    """Images [B, Y, X, I] and a kernel [Y, X, I, O]. Rows and columns stay whole: the partitioner is known to compute
    kernels' gradients wrongly where they are sharded."""
    if op.get_attr("data_format") != b"NHWC":
        return None
    image, kernel, out = (known_shape(x) for x in (*op.inputs, *op.outputs))
    grouped = image[3] != kernel[2]
    channels, made = (None, None) if grouped else ("I", "O")
    inputs = ("B", None, None, channels), (None, None, channels, made)
    flops = product_flops([*out, *kernel[:3]])
    return rule(op, inputs, [("B", None, None, made)], flops, heavy=True)


def depthwise(op: Any) -> Rule | None:
    """Images [B, Y, X, C] and a kernel [Y, X, C, 1]: channels do not meet."""
    kernel, out = known_shape(op.inputs[1]), known_shape(op.outputs[0])
    if op.get_attr("data_format") != b"NHWC" or kernel[3] != 1:
        return None
    dims = ("B", None, None, "C")
    flops = product_flops([*out, *kernel[:2]])
    return rule(op, [dims, (None, None, "C", None)], [dims], flops, heavy=True)


def pool(op: Any) -> Rule | None:
    """Windows of [B, Y, X, C]."""
    if op.get_attr("data_format") != b"NHWC":
        return None
    dims = whole(numbered(op.inputs[0]), 1, 2)
    return rule(op, [dims], [dims])


def batch_norm(op: Any) -> Rule | None:
    """Images [B, Y, X, C], whose statistics [C] go over everything else."""
    if op.get_attr("data_format") != b"NHWC":
        return None
    dims = whole(numbered(op.inputs[0]), 1, 2)
    outputs = [dims if len(known_shape(y)) == 4 else dims[3:] for y in op.outputs[:5]]
    outputs += [(None,) * len(known_shape(y)) for y in op.outputs[5:]]
    return rule(op, [dims, *[dims[3:]] * 4], outputs)


def gather(op: Any) -> Rule | None:
    """Slices of a table at given places. Where the table's own dimension is sharded, each device looks its part up,
    and the results are summed."""
    axis = dimension_of(op.inputs[2], op.inputs[0])
    if axis is None or op.get_attr("batch_dims"):
        return None
    table = tuple(f"t{i}" for i in numbered(op.inputs[0]))
    places = tuple(f"p{i}" for i in numbered(op.inputs[1]))
    return rule(op, [table, places], [(*table[:axis], *places, *table[axis + 1 :])], heavy=True)


def one_hot(op: Any) -> Rule | None:
    """A dimension of classes is added."""
    dims = numbered(op.outputs[0])
    return rule(op, [without(dims, op.get_attr("axis") % len(dims))], [dims])


def sum_of_squares(op: Any) -> Rule | None:
    """Half the sum of the squares, a scalar."""
    return rule(op, [numbered(op.inputs[0])], [()])


RULES: dict[str, RuleOf] = {
    "MatMul": matmul,
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), batch_matmul),
    "Einsum": einsum,
    "Conv2D": convolution,
    "DepthwiseConv2dNative": depthwise,
    **dict.fromkeys(("MaxPool", "AvgPool"), pool),
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), batch_norm),
    "GatherV2": gather,
    "OneHot": one_hot,
    "L2Loss": sum_of_squares,
}
