"""The rules by which operations map the dimensions of their operands to those of their results, in letters.

An operation runs over an iteration space whose dimensions have letters, as an einsum's do. Each dimension of an
operand or a result is one letter, or None where it cannot be sharded. A letter that the results lack is summed (or
reduced otherwise): where it is sharded, each device has a part of every sum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

Letter = str
Dims = tuple[Letter | None, ...]


@dataclass(frozen=True)
class Rule:
    """One operation in letters."""

    # Of each operand; None for one that is a number of the operation, such as a permutation.
    inputs: tuple[Dims | None, ...]
    outputs: tuple[Dims, ...]  # of each result
    sizes: Mapping[Letter, int] = field(default_factory=dict)  # of each letter
    flops: int = 0  # of products, over all devices
    # Whether it is an operator of its own. One that is not takes the sharding of what it reads.
    heavy: bool = False

    @property
    def reduced(self) -> frozenset[Letter]:
        """The letters over which results are reduced."""
        kept = {letter for dims in self.outputs for letter in dims}
        return frozenset(letter for letter in self.sizes if letter not in kept)


RuleOf = Callable[[Any], Rule | None]


def shape_of(tensor: Any) -> list[int]:
    """The static shape of a tensor. Raises ValueError: it has none."""
    return [int(n) for n in tensor.shape.as_list()]


def number_of(tensor: Any) -> Any:
    """The value of an operand that is known while tracing; None if it is not."""
    return tf.get_static_value(tensor)


def numbered(shape: Sequence[int]) -> Dims:
    """A letter for each dimension that has more than one element."""
    return tuple(str(i) if n > 1 else None for i, n in enumerate(shape))


def sizes_of(*pairs: tuple[Dims, Sequence[int]]) -> dict[Letter, int]:
    """The size of each letter, the greatest common divisor where tensors differ."""
    sizes: dict[Letter, int] = {}
    for dims, shape in pairs:
        for letter, size in zip(dims, shape, strict=True):
            if letter is not None:
                sizes[letter] = math.gcd(sizes.get(letter, 0), size)
    return sizes


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
    if op.get_attr("keep_dims"):
        out = tuple(None if i in gone else d for i, d in enumerate(dims))
    else:
        out = tuple(d for i, d in enumerate(dims) if i not in gone)
    return Rule((dims, None), (out,), sizes_of((dims, shape)))


def whole_last(op: Any) -> Rule | None:
    """Each row of the last dimension is worked on as a whole, e.g. sorted."""
    shape = shape_of(op.inputs[0])
    dims = (*numbered(shape)[:-1], None)
    outputs = tuple((*dims[:-1], None) for _ in op.outputs)
    rest = (None,) * (len(op.inputs) - 1)
    return Rule((dims, *rest), outputs, sizes_of((dims, shape)))


def whole_axis(op: Any) -> Rule | None:
    """The dimension that the second operand names is worked on as a whole, e.g. summed up step by step."""
    axis = number_of(op.inputs[1])
    if axis is None:
        return None
    shape = shape_of(op.inputs[0])
    whole = int(axis) % len(shape)
    dims = tuple(None if i == whole else d for i, d in enumerate(numbered(shape)))
    out = dims
    if len(shape_of(op.outputs[0])) < len(shape):
        out = tuple(d for i, d in enumerate(dims) if i != whole)
    return Rule((dims, None), (out,), sizes_of((dims, shape)))


def softmax(op: Any) -> Rule | None:
    """Normalizes the last dimension, which can be sharded: maxima and sums go over the devices."""
    shape = shape_of(op.inputs[0])
    dims = numbered(shape)
    return Rule((dims,), (dims,), sizes_of((dims, shape)))


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
    **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    **dict.fromkeys(
        ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"), cross_entropy
    ),
    "BiasAdd": bias_add,
}
