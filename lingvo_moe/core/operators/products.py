"""The rules of operators of their own: products, convolutions, look-ups in tables."""

import math
from collections.abc import Iterable
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


def matmul(op: Any) -> Rule | None:
    """[I, K] times [K, J], either of them maybe transposed."""
    first = "KI" if op.get_attr("transpose_a") else "IK"
    second = "JK" if op.get_attr("transpose_b") else "KJ"
    return _product(op, first, second, "IJ")


def batch_matmul(op: Any) -> Rule | None:
    """[..., I, K] times [..., K, J], whose leading dimensions are broadcast."""
    shapes = [shape_of(x) for x in op.inputs]
    rank = len(shape_of(op.outputs[0]))
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
    shapes = [shape_of(op.inputs[0]), shape_of(op.outputs[0])]
    dims = [_dims(name, shape) for name, shape in zip((names[0], result), shapes)]
    return Rule((dims[0],), (dims[1],), sizes_of((dims[0], shapes[0])))


def _product(op: Any, first: str, second: str, result: str) -> Rule | None:
    shapes = [shape_of(x) for x in (*op.inputs, *op.outputs)]
    dims = [_dims(name, shape) for name, shape in zip((first, second, result), shapes)]
    sizes = sizes_of(*zip(dims, shapes, strict=True))
    full = {
        letter: max(size for name, shape in zip((first, second), shapes) for c, size in zip(name, shape) if c == letter)
        for letter in set(first + second)
    }  # fmt: skip
    flops = product_flops(full.values())
    return Rule((dims[0], dims[1]), (dims[2],), sizes, flops, heavy=True)


def _dims(name: str, shape: list[int]) -> Dims:
    return tuple(letter if size > 1 else None for letter, size in zip(name, shape, strict=True))


def convolution(op: Any) -> Rule | None:
    """Images [B, Y, X, I] and a kernel [Y, X, I, O]. Rows and columns stay whole: the partitioner is known to compute
    kernels' gradients wrongly where they are sharded."""
    if op.get_attr("data_format") != b"NHWC":
        return None
    image, kernel, out = (shape_of(x) for x in (*op.inputs, *op.outputs))
    grouped = image[3] != kernel[2]
    channels = None if grouped else "I"
    made = None if grouped else "O"
    dims: tuple[Dims, ...] = (
        ("B", None, None, channels),
        (None, None, channels, made),
        ("B", None, None, made),
    )
    kept = tuple(
        tuple(d if n > 1 else None for d, n in zip(each, shape))
        for each, shape in zip(dims, (image, kernel, out))
    )
    flops = product_flops([*out, *kernel[:3]])
    sizes = sizes_of(*zip(kept, (image, kernel, out)))
    return Rule(kept[:2], kept[2:], sizes, flops, heavy=True)


def depthwise(op: Any) -> Rule | None:
    """Images [B, Y, X, C] and a kernel [Y, X, C, 1]: channels do not meet."""
    image, kernel, out = (shape_of(x) for x in (*op.inputs, *op.outputs))
    if op.get_attr("data_format") != b"NHWC" or kernel[3] != 1:
        return None
    flops = product_flops([*out, *kernel[:2]])
    dims: tuple[Dims, ...] = (("B", None, None, "C"), (None, None, "C", None))
    return Rule(dims, dims[:1], {"B": image[0], "C": image[3]}, flops, heavy=True)


def pool(op: Any) -> Rule | None:
    """Windows of [B, Y, X, C]."""
    if op.get_attr("data_format") != b"NHWC":
        return None
    shape = shape_of(op.inputs[0])
    dims = whole(numbered(shape), 1, 2)
    return Rule((dims,), (dims,), sizes_of((dims, shape)))


def batch_norm(op: Any) -> Rule | None:
    """Images [B, Y, X, C], whose statistics [C] go over everything else."""
    if op.get_attr("data_format") != b"NHWC":
        return None
    shape = shape_of(op.inputs[0])
    dims = whole(numbered(shape), 1, 2)
    channels = (dims[3],)
    outputs = tuple(dims if len(shape_of(y)) == 4 else channels for y in op.outputs[:5])
    outputs += tuple((None,) * len(shape_of(y)) for y in op.outputs[5:])
    return Rule((dims, *(channels,) * 4), outputs, sizes_of((dims, shape)))


def gather(op: Any) -> Rule | None:
    """Slices of a table at given places. Where the table's own dimension is sharded, each device looks its part up,
    and the results are summed."""
    axis = number_of(op.inputs[2])
    if axis is None or op.get_attr("batch_dims"):
        return None
    table, places, out = shape_of(op.inputs[0]), shape_of(op.inputs[1]), shape_of(op.outputs[0])
    axis = int(axis) % len(table)
    own = [f"t{i}" if n > 1 else None for i, n in enumerate(table)]
    where = [f"p{i}" if n > 1 else None for i, n in enumerate(places)]
    dims = (*own[:axis], *where, *own[axis + 1 :])
    sizes = sizes_of((tuple(own), table), (tuple(where), places), (dims, out))
    return Rule((tuple(own), tuple(where), None), (dims,), sizes, heavy=True)


def one_hot(op: Any) -> Rule | None:
    """A dimension of classes is added."""
    shape = shape_of(op.outputs[0])
    axis = op.get_attr("axis") % len(shape)
    dims = numbered(shape)
    return Rule((without(dims, axis), *(None,) * 3), (dims,), sizes_of((dims, shape)))


def sum_of_squares(op: Any) -> Rule | None:
    """Half the sum of the squares, a scalar."""
    shape = shape_of(op.inputs[0])
    dims = numbered(shape)
    return Rule((dims,), ((),), sizes_of((dims, shape)))


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
