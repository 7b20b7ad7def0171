"""The kernels for XLA: einsums, annotations and elementwise chains, which XLA partitions and fuses.

They also run eagerly and in graphs without XLA, e.g. in tests. What each function computes is said in `Kernels`
(`__init__.py`). Letters as there; R also counts the heads of queries that share keys and values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.kernels import blockwise, grouped_matmul as grouped
from lingvo_moe.core.kernels.scores import Seen, by_head, masked_softmax
from lingvo_moe.core.kernels.weights import Weight
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.private.tensorflow import gen_xla_ops
from lingvo_moe.core.tensors import custom_gradient, dim, in_xla, shape_of

Shard = Callable[[tf.Tensor, str], tf.Tensor]
Drop = Callable[[tf.Tensor], tf.Tensor]
Keep = Callable[[tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class Activation:
    """An elementwise function of the products of a feed-forward layer's input: see layers/feed_forward.py."""

    # Of the input's product with wi; if gated, of its product with wi_gate and of that with wi.
    function: Callable[..., tf.Tensor]
    flops: int  # about how many operations it takes for each element
    gated: bool = False  # whether there is a second product (Shazeer 2020, "GLU Variants Improve Transformer")

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights [M,H] whose products the function takes, in its order."""
        return ("wi_gate", "wi") if self.gated else ("wi",)

    @property
    def products(self) -> int:
        """The number of products with weights of a feed-forward layer, the last one included."""
        return len(self.weights) + 1


def batch_independent(fn: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    return fn(x)


# --- products


def product(x: tf.Tensor, w_MH: Weight) -> tf.Tensor:
    return tf.einsum("BTM,MH->BTH", x, w_MH)


def experts_feed_forward(
    x_EGCM: tf.Tensor,
    weights: NestedMap,
    activation: Activation,
    drop: Drop | None,
    shard: Shard,
    keep_hidden: Keep | None = None,
) -> tf.Tensor:
    products = [_expert_product(x_EGCM, weights[name]) for name in activation.weights]
    if keep_hidden is not None:
        products = [keep_hidden(product) for product in products]
    h_EGCH = shard(activation.function(*products), "EGCH")
    if drop is not None:
        h_EGCH = drop(h_EGCH)
    return shard(_expert_product(h_EGCH, weights.wo), "EGCM")


@custom_gradient
def _expert_product(x_EGCM: tf.Tensor, w_EMH: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Each expert's slots times its matrix, [E,G,C,H]."""

    def grad(dy_EGCH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # The weights first: the operand that is then transposed is the rows, which are few. XLA:CPU takes up to three
        # times as long for rows times transposed weights (docs/speed.md).
        dx_EGCM = tf.einsum("EMH,EGCH->EGCM", w_EMH, dy_EGCH)
        return dx_EGCM, tf.einsum("EGCM,EGCH->EMH", x_EGCM, dy_EGCH)

    return tf.einsum("EGCM,EMH->EGCH", x_EGCM, w_EMH), grad


def grouped_matmul(
    rows_RM: tf.Tensor, weights_EMH: tf.Tensor, group_sizes_E: tf.Tensor, rows_expected: int | None
) -> tf.Tensor:
    """See `Kernels`; without XLA the static shapes that it needs would gain nothing."""
    form = grouped.by_tiles if in_xla() else grouped.by_group
    return form(rows_RM, weights_EMH, group_sizes_E, rows_expected)


def sort_rows(
    group_N: tf.Tensor, groups: int, fewest: int = 1
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `Kernels`; each place has a row."""
    assert fewest == 1, fewest
    (count,) = shape_of(group_N)
    at = tf.range(count)
    order = _stable_order(group_N)
    place_N = tf.scatter_nd(order[:, tf.newaxis], at, [count])
    owner = tf.where(group_N < groups, group_N, -1)
    sizes = tf.math.unsorted_segment_sum(tf.ones_like(group_N), owner, groups)
    return place_N, tf.where(at < tf.reduce_sum(sizes), order, -1), sizes


def _stable_order(key: tf.Tensor) -> tf.Tensor:
    """The indices that sort a vector of int32, equal keys in their order."""
    if not in_xla():
        return tf.argsort(key, stable=True)

    # tf.argsort is a top-k to XLA, of a size that the TPU compiler takes for dynamic in a region.
    @tf.function(autograph=False)
    def before(a: tf.Tensor, b: tf.Tensor, i: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        return a < b

    at = tf.range(dim(key, 0))
    comparator = before.get_concrete_function(*[tf.TensorSpec([], tf.int32)] * 4)
    sort = gen_xla_ops.xla_variadic_sort
    return sort([key, at], tf.constant(0), comparator=comparator, is_stable=True)[1]


# --- attention

# A cache is the operand of two products as it is; in another order XLA copies all of it in each step. As seen by masks,
# position j of step t is t J + j.
MEMORY, CACHE = "BSNK", "BNLJK"


@dataclass(frozen=True)
class CacheShape:
    """The sizes and the type of the keys, or the values, of a search."""

    batch: int | tf.Tensor  # B, an int or an int32 scalar
    length: int  # L, steps
    hypotheses: int  # J
    heads: int  # A
    size: int  # K
    dtype: tf.DType  # the activations' type


def project_heads(
    query: tf.Tensor | None,
    source: tf.Tensor | None,
    weights: NestedMap,
    scale: float,
    shard: Shard,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `Kernels`; [B,T,N,K] and twice [B,S,A,K]. Heads of keys and values have the letter A where they are fewer."""
    q = k = v = None
    if query is not None:
        q = tf.einsum("BTM,MNK->BTNK", query, tf.cast(weights.q, query.dtype))
        q = shard(q * tf.constant(scale, q.dtype), "BTNK")
    if source is not None:
        k = tf.einsum("BSM,MNK->BSNK", source, tf.cast(weights.k, source.dtype))
        v = tf.einsum("BSM,MNK->BSNK", source, tf.cast(weights.v, source.dtype))
        letters = "BSNK" if weights.k.shape[1] == weights.q.shape[1] else "BSAK"
        k, v = shard(k, letters), shard(v, letters)
    return q, k, v


def per_head(x_BTK: tf.Tensor) -> tf.Tensor:
    return x_BTK[:, :, tf.newaxis]


def in_layout(x_BTNK: tf.Tensor) -> tf.Tensor:
    return x_BTNK


def out_of_layout(x: tf.Tensor) -> tf.Tensor:
    return x


def attend(
    q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen, drop: Drop | None = None
) -> tf.Tensor:
    """See `Kernels`; rows go by blocks, which have no dropout."""
    if seen.mask is None and drop is None:
        return blockwise.attend(q, k, v, seen)
    probs = masked_softmax(by_head("BTNK,BSNK->BNTS", q, k), seen)
    probs = tf.cast(probs, v.dtype)
    if drop is not None:
        probs = drop(probs)
    return by_head("BNTS,BSNK->BTNK", probs, v)


def project_back(context_BTNK: tf.Tensor, o_NKM: Weight) -> tf.Tensor:
    return tf.einsum("BTNK,NKM->BTM", context_BTNK, tf.cast(o_NKM, context_BTNK.dtype))


def empty_cache(shape: CacheShape) -> tf.Tensor:
    sizes = [shape.batch, shape.heads, shape.length, shape.hypotheses, shape.size]
    return tf.zeros(sizes, shape.dtype)


def write_cache(cache: tf.Tensor, new: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
    new = tf.transpose(new, [0, 2, 1, 3])  # BNJK, or BNPK of consecutive steps
    new = new[:, :, :, tf.newaxis] if time.shape.rank else new[:, :, tf.newaxis]
    first = tf.reshape(tf.cast(time, tf.int32), [-1])[0]
    if not in_xla():
        after = first + dim(new, 2)
        y = tf.concat([cache[:, :, :first], new, cache[:, :, after:]], 2)
        return tf.ensure_shape(y, cache.shape)
    place = tf.scatter_nd([[2]], first[tf.newaxis], [5])
    return gen_xla_ops.xla_dynamic_update_slice(cache, new, place)


def seen_positions(
    query_at: tf.Tensor | None, time: tf.Tensor, mask: tf.Tensor
) -> tuple[tf.Tensor | None, tf.Tensor]:
    hypotheses = 1 if time.shape.rank else dim(mask, 1)
    return query_at, tf.range(dim(mask, 2))[tf.newaxis] // hypotheses


def attend_cache(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen) -> tf.Tensor:
    """See `Kernels`; keys come first in their product, or XLA's compiler for GPUs copies them in each step."""
    batch, queries, heads, size = shape_of(q)
    shared, steps, num_hyps = dim(k, 1), dim(k, 2), dim(k, 3)
    q = tf.reshape(q, [batch, queries, shared, heads // shared, size])
    logits = tf.einsum("BALIK,BJARK->BARJLI", k, q)
    logits = tf.reshape(logits, [batch, heads, queries, steps * num_hyps])
    probs = tf.cast(masked_softmax(logits, seen), v.dtype)
    probs = tf.reshape(probs, [batch, shared, heads // shared, queries, steps, num_hyps])
    context = tf.einsum("BARJLI,BALIK->BJARK", probs, v)
    return tf.reshape(context, [batch, queries, heads, dim(v, 4)])


# --- normalization and dropout


def normalize(
    x: tf.Tensor, scale_M: tf.Tensor, bias_M: tf.Tensor | None, epsilon: float
) -> tf.Tensor:
    # Sums times 1/M: the gradient of tf.reduce_mean would make a constant as large as x.
    per_element = 1.0 / x.shape[-1]
    if bias_M is not None:
        x -= tf.reduce_sum(x, axis=-1, keepdims=True) * per_element
    mean_square = tf.reduce_sum(x * x, axis=-1, keepdims=True) * per_element
    y = x * tf.math.rsqrt(mean_square + epsilon) * tf.cast(scale_M, tf.float32)
    return y if bias_M is None else y + tf.cast(bias_M, tf.float32)


def dropout(x: tf.Tensor, rate: float, seed: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    return scaled_where(randomness.kept(seed, x.shape, rate, rows), x, rate)


def scaled_where(stays: tf.Tensor, x: tf.Tensor, rate: float) -> tf.Tensor:
    """x / (1 - rate) where `stays` is true, else 0."""
    return tf.where(stays, x * tf.constant(1 / (1 - rate), x.dtype), tf.constant(0, x.dtype))


# --- losses


def logits(x: tf.Tensor, table_VM: Weight, shard: Shard) -> tf.Tensor:
    y = tf.einsum("BTM,VM->BTV", x, tf.cast(table_VM, x.dtype))
    return shard(tf.cast(y, tf.float32), "BTV")


def token_losses(
    x: tf.Tensor,
    table_VM: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    label_smoothing: float,
    shard: Shard,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    scores = logits(x, table_VM, shard)
    weights = tf.cast(weights, tf.float32)
    best = tf.argmax(scores, axis=-1, output_type=tf.int32)
    correct = tf.cast(tf.equal(best, tf.cast(labels, tf.int32)), tf.float32)
    xent = cross_entropy(scores, labels, label_smoothing) * weights
    correct = correct * weights
    nll = cross_entropy(tf.stop_gradient(scores), labels, 0.0)
    return xent, nll * weights, correct


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float) -> tf.Tensor:
    """See `Kernels`; the gradient keeps the logits and one number for each label, and rebuilds the rest elementwise."""
    num = logits.shape[-1]
    on, off = 1.0 - label_smoothing, label_smoothing / num

    @private.custom_gradient
    def xent(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        # A one-hot product instead of a gather: it partitions and fuses, and needs no table of ids.
        partition = tf.reduce_logsumexp(logits, axis=-1)
        picked = tf.reduce_sum(logits * tf.one_hot(labels, num), axis=-1)
        loss = partition - on * picked
        if label_smoothing:
            loss -= off * tf.reduce_sum(logits, axis=-1)

        def grad(dloss: tf.Tensor) -> tuple[tf.Tensor, None]:
            probs = tf.exp(logits - partition[..., tf.newaxis])
            target = tf.one_hot(labels, num, on_value=on + off, off_value=off)
            return dloss[..., tf.newaxis] * (probs - target), None

        return loss, grad

    return xent(logits, labels)


# --- optimizer and training step


class Delta(Protocol):
    """The value that an update subtracts from one weight.

    Attributes:
        grad_square: the sum of the squares of the gradient, where the update computed it anyway; else None.
    """

    @property
    def grad_square(self) -> tf.Tensor | None: ...

    def SumOfSquares(self) -> tf.Tensor:
        """The sum of the squares of the update, a float32 scalar."""

    def SubtractFrom(self, weight: tf.Tensor) -> tf.Tensor:
        """The new weight, in the type of the old one."""


@dataclass(frozen=True)
class DenseDelta:
    """A `Delta` that is a float32 tensor of the weight's shape."""

    value: tf.Tensor
    grad_square: None = None

    def SumOfSquares(self) -> tf.Tensor:
        return tf.reduce_sum(tf.square(self.value))

    def SubtractFrom(self, weight: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(weight, tf.float32) - self.value, weight.dtype)


@dataclass(frozen=True)
class AppliedDelta:
    """A `Delta` whose new weight was computed with the update; `square` is the sum of squares of the update."""

    weight: tf.Tensor
    square: tf.Tensor
    grad_square: tf.Tensor | None = None

    def SumOfSquares(self) -> tf.Tensor:
        return self.square

    def SubtractFrom(self, weight: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.weight, weight.dtype)


@dataclass(frozen=True)
class AdafactorRecipe:
    """The numbers of one step of Adafactor for one variable; see optimizers/adafactor.py."""

    decay: tf.Tensor  # the decay of the second moment, float32 scalar
    rate: tf.Tensor  # the learning rate, float32 scalar
    # `epsilon1` to `multiply_by_parameter_scale`: the optimizer's parameters.
    epsilon1: float
    epsilon2: float
    clip_threshold: float
    multiply_by_parameter_scale: bool
    # The two that are factored; None: the second moment is kept in full.
    dims: tuple[int, int] | None
    stack_dims: int  # how many leading dimensions count layers, each with statistics of its own

    def Average(self, old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        """The second moment after this step."""
        return self.decay * old + (1.0 - self.decay) * new


def adafactor(
    weight: tf.Tensor, grad: tf.Tensor, slots: NestedMap, recipe: AdafactorRecipe
) -> tuple[Delta, NestedMap]:
    decay, rate, *numbers = (getattr(recipe, field.name) for field in fields(recipe))
    update, new_slots = _adafactor(weight, grad, slots, decay, rate, tuple(numbers))
    return DenseDelta(update), new_slots


@tf.function(autograph=False)
def _adafactor(
    weight: tf.Tensor,
    grad: tf.Tensor,
    slots: NestedMap,
    decay: tf.Tensor,
    rate: tf.Tensor,
    numbers: tuple,
) -> tuple[tf.Tensor, NestedMap]:
    """(update, new slots). A function of its own: a model has few shapes of variables, and each is traced once."""
    recipe = AdafactorRecipe(decay, rate, *numbers)
    square = tf.square(grad) + recipe.epsilon1
    if recipe.dims is not None:
        first, second = recipe.dims
        row = recipe.Average(slots.row, tf.reduce_mean(square, second))
        col = recipe.Average(slots.col, tf.reduce_mean(square, first))
        relative_row = row / tf.reduce_mean(row, first, keepdims=True)
        update = grad * tf.expand_dims(tf.math.rsqrt(relative_row), second)
        update *= tf.expand_dims(tf.math.rsqrt(col), first)
        new_slots = NestedMap(row=row, col=col)
    else:
        full = recipe.Average(slots.full, square)
        update = grad * tf.math.rsqrt(full)
        new_slots = NestedMap(full=full)
    if recipe.clip_threshold:
        excess = _rms(update, recipe.stack_dims) * (1.0 / recipe.clip_threshold)
        update *= tf.math.reciprocal(tf.maximum(excess, 1.0))
    if recipe.multiply_by_parameter_scale:
        update *= tf.maximum(_rms(weight, recipe.stack_dims), recipe.epsilon2)
    return update * recipe.rate, new_slots


def _rms(x: tf.Tensor, stack_dims: int) -> tf.Tensor:
    """The root mean square of each layer's part of x, broadcastable to x."""
    axes = list(range(stack_dims, x.shape.rank))
    count = math.prod(x.shape[stack_dims:])
    return tf.sqrt(tf.reduce_sum(tf.square(x), axes, keepdims=True) * (1.0 / count))


def sum_of_squares(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(x))


def one_pass(fn: Callable[..., tuple], *args: tf.Tensor) -> tuple:
    return fn(*args)


def slices(stacks: Sequence[tf.Tensor], num: int) -> list[list[tf.Tensor]]:
    return [[stack[i] for stack in stacks] for i in range(num)]


def select(condition: tf.Tensor, new: list[tf.Tensor], old: list[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.where(condition, a, b) for a, b in zip(new, old, strict=True)]
