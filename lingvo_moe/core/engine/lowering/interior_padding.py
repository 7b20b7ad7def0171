"""Writes padding between elements as reshapes and padding at the edges.

XLA's partitioner gets a Pad with interior padding wrong, or ends the process, if the result is sharded along the padded
dimension and the operand is not. TensorFlow writes the gradient of a strided slice as such a Pad, and that of average
pooling. The same tensor comes out of a reshape from [n] to [n, 1], padding to [n, stride], a reshape to [n * stride]
and padding at the edges, and all of these are partitioned rightly.
"""

from typing import Any

from lingvo_moe.core.private.jax import ir, stablehlo


def without_interior_padding(module: Any) -> None:
    """Changes a StableHLO module so that no Pad in it has interior padding."""
    pads: list[Any] = []

    def remember(op: Any) -> Any:
        if op.name == "stablehlo.pad" and any(op.attributes["interior_padding"]):
            pads.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(remember)
    for op in pads:
        with module.context, op.location, ir.InsertionPoint(op):
            op.results[0].replace_all_uses_with(_rewritten(op))
        op.erase()


def _rewritten(op: Any) -> Any:
    """The value of a Pad, by operations before it."""
    operand, value = op.operands
    sizes, kind = operand.type.shape, operand.type.element_type
    low, high, interior = (
        list(op.attributes[name])
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    strides = [1 + between if size > 1 else 1 for size, between in zip(sizes, interior)]
    # As much of the low padding comes before every element as lets parts of the operand become parts of the result.
    firsts = [edge % stride for edge, stride in zip(low, strides)]
    lasts = [stride - 1 - first for stride, first in zip(strides, firsts)]

    def reshape(x: Any, shape: list[int]) -> Any:
        return stablehlo.reshape(ir.RankedTensorType.get(shape, kind), x)

    def pad(x: Any, low: list[int], high: list[int]) -> Any:
        return stablehlo.pad(x, value, low, high, [0] * len(low))

    x = reshape(operand, [n for size in sizes for n in (size, 1)])
    x = pad(
        x, [n for first in firsts for n in (0, first)], [n for last in lasts for n in (0, last)]
    )
    x = reshape(x, [size * stride for size, stride in zip(sizes, strides)])
    return pad(
        x,
        [edge - first for edge, first in zip(low, firsts)],
        [edge - last for edge, last in zip(high, lasts)],
    )
