"""The rules of elementwise operations, and of reductions, normalizations and sorting along dimensions."""

from typing import Any

from lingvo_moe.core.operators.rule import (
    Rule,
    RuleOf,
    number_of,
    numbered,
    shape_of,
    sizes_of,
    whole,
    without,
)


def elementwise(op: Any) -> Rule | None:
    """Operands are broadcast to the result's shape."""
    shape = shape_of(op.outputs[0])
    dims = numbered(shape)
    inputs = []
    for x in op.inputs:
        own = shape_of(x)
        last = dims[len(dims) - len(own) :]
        inputs.append(tuple(d if n > 1 else None for d, n in zip(last, own)))
    return Rule(tuple(inputs), (dims,) * len(op.outputs), sizes_of((dims, shape)))


def bias_add(op: Any) -> Rule | None:
    """A vector is added to the channels."""
    shape = shape_of(op.outputs[0])
    dims = numbered(shape)
    channels = dims[1] if op.get_attr("data_format") == b"NCHW" else dims[-1]
    return Rule((dims, (channels,)), (dims,), sizes_of((dims, shape)))


def reduction(op: Any) -> Rule | None:
    """Sums, maxima, ... over the dimensions that the second operand lists."""
    axes = number_of(op.inputs[1])
    if axes is None:
        return None
    shape = shape_of(op.inputs[0])
    gone = {int(a) % len(shape) for a in axes.flatten()} if shape else set()
    dims = numbered(shape)
    out = whole(dims, *gone) if op.get_attr("keep_dims") else without(dims, *gone)
    return Rule((dims, None), (out,), sizes_of((dims, shape)))


def whole_last(op: Any) -> Rule | None:
    """Each row of the last dimension is worked on as a whole, e.g. sorted."""
    shape = shape_of(op.inputs[0])
    dims = (*numbered(shape)[:-1], None)
    rest = (None,) * (len(op.inputs) - 1)
    return Rule((dims, *rest), (dims,) * len(op.outputs), sizes_of((dims, shape)))


def whole_axis(op: Any) -> Rule | None:
    """The dimension that the second operand names is worked on as a whole, e.g. summed up step by step."""
    axis = number_of(op.inputs[1])
    if axis is None:
        return None
    shape = shape_of(op.inputs[0])
    axis = int(axis) % len(shape)
    dims = whole(numbered(shape), axis)
    out = without(dims, axis) if len(shape_of(op.outputs[0])) < len(shape) else dims
    return Rule((dims, None), (out,), sizes_of((dims, shape)))


def cross_entropy(op: Any) -> Rule | None:
    """Logits [B, V] and labels, [B] or [B, V]: the loss [B] and the gradient [B, V]."""
    shape = shape_of(op.inputs[0])
    dims = numbered(shape)
    labels = dims[: len(shape_of(op.inputs[1]))]
    return Rule((dims, labels), (dims[:1], dims), sizes_of((dims, shape)))


_ELEMENTWISE_NAMES = (
    "Abs Add AddN AddV2 Acos Asin Atan Atan2 Bitcast BitwiseAnd BitwiseOr BitwiseXor "
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
    **dict.fromkeys(("TopKV2", "TopK", "InTopKV2"), whole_last),
    **dict.fromkeys(("ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp"), whole_axis),
    # Which normalize the last dimension; it can be sharded: maxima and sums go over the devices.
    **dict.fromkeys(("Softmax", "LogSoftmax"), elementwise),
    **dict.fromkeys(
        ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"), cross_entropy
    ),
    "BiasAdd": bias_add,
}
