"""The rules of elementwise operations, and of reductions, normalizations and sorting along dimensions."""

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
from lingvo_moe.core.randomness import is_draw


def elementwise(op: Any) -> Rule | None:
    """Operands are broadcast to the result's shape."""
    dims = numbered(op.outputs[0])
    values = op.inputs[:1] if op.type == "BroadcastTo" else op.inputs
    return rule(op, [dims[len(dims) - len(known_shape(x)) :] for x in values], [dims])


def draw(op: Any) -> Rule | None:
    """Random bits depend on the seed and on their position, so each device draws its part; None for other functions."""
    if not is_draw(op):
        return None
    dims = numbered(op.outputs[0])
    stacked = len(known_shape(op.inputs[0])) - 1
    return rule(op, [(*dims[:stacked], None)], [dims])


def bias_add(op: Any) -> Rule | None:
    """A vector is added to the channels."""
    dims = numbered(op.outputs[0])
    channels = dims[1] if op.get_attr("data_format") == b"NCHW" else dims[-1]
    return rule(op, [dims, (channels,)], [dims])


def reduction(op: Any) -> Rule | None:
    """Sums, maxima, ... over the dimensions that the second operand lists."""
    axes = number_of(op.inputs[1])
    if axes is None:
        return None
    dims = numbered(op.inputs[0])
    gone = {int(a) % len(dims) for a in axes.flatten()} if dims else set()
    return rule(
        op, [dims], [whole(dims, *gone) if op.get_attr("keep_dims") else without(dims, *gone)]
    )


def whole_last(op: Any) -> Rule | None:
    """Each row of the last dimension is worked on as a whole, e.g. sorted."""
    dims = (*numbered(op.inputs[0])[:-1], None)
    return rule(op, [dims], [dims])


def in_top_k(op: Any) -> Rule | None:
    """Predictions [B, C] and targets [B]: whether each target is among the largest of its row."""
    return rule(op, [("B", None), ("B",)], [("B",)])


def whole_axis(op: Any) -> Rule | None:
    """The dimension that the second operand names is worked on as a whole, e.g. summed up step by step."""
    axis = dimension_of(op.inputs[1], op.inputs[0])
    if axis is None:
        return None
    dims = whole(numbered(op.inputs[0]), axis)
    gone = len(known_shape(op.outputs[0])) < len(dims)
    return rule(op, [dims], [without(dims, axis) if gone else dims])


def cross_entropy(op: Any) -> Rule | None:
    """Logits [B, V] and labels, [B] or [B, V]: the loss [B] and the gradient [B, V]."""
    dims = numbered(op.inputs[0])
    labels = dims[: len(known_shape(op.inputs[1]))]
    return rule(op, [dims, labels], [dims[:1], dims])


_ELEMENTWISE_NAMES = (
    "Abs Add AddN AddV2 Acos Asin Atan Atan2 BitwiseAnd BitwiseOr BitwiseXor "
    "BroadcastTo Cast Ceil CheckNumerics ClipByValue Complex Conj Cos Cosh Digamma Div "
    "DivNoNan Elu EluGrad EnsureShape Equal Erf Erfc Exp Expm1 Floor FloorDiv FloorMod "
    "Greater GreaterEqual Identity Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift "
    "Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul "
    "MulNoNan Neg NextAfter NotEqual OnesLike Pow PreventGradient Real RealDiv Reciprocal "
    "Relu Relu6 ReluGrad RightShift Rint Round Rsqrt RsqrtGrad Select SelectV2 Selu Sigmoid "
    "SigmoidGrad Sign Sin Sinh Softplus Softsign Sqrt SqrtGrad Square SquaredDifference "
    "StopGradient Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlogy ZerosLike "
)
_REDUCTIONS = ("All", "Any", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum")

RULES: dict[str, RuleOf] = {
    **dict.fromkeys(_ELEMENTWISE_NAMES.split(), elementwise),
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(("TopKV2", "TopK"), whole_last),
    "InTopKV2": in_top_k,
    **dict.fromkeys(("ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp"), whole_axis),
    # Which normalize the last dimension; it can be sharded: maxima and sums go over the devices.
    **dict.fromkeys(("Softmax", "LogSoftmax"), elementwise),
    **dict.fromkeys(
        ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"), cross_entropy
    ),
    "BiasAdd": bias_add,
    "PartitionedCall": draw,
}
