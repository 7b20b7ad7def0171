"""The kernels for TensorFlow's own kernels: few products, few transpositions, few passes over memory.

What each function computes is said in `Kernels` (`__init__.py`). They run on one device, so nothing is annotated.
Letters as there; R also counts rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.kernels import grouped_matmul as grouped
from lingvo_moe.core.kernels import xla
from lingvo_moe.core.kernels.xla import Activation, AdafactorRecipe, Delta, Drop, Keep, Shard
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import shape_of

_MASKED = -1e9  # added to a masked logit: beside it a float32 logit vanishes

# Where each expert has few rows, the weights decide what a product costs (see `experts_feed_forward`).
_FEW_ROWS = 128
_MANY_EXPERTS = 256  # with more, a product for each would be a large graph

logits = xla.logits
cross_entropy = xla.cross_entropy


def fused(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that XLA compiles by itself: for chains of elementwise operations and reductions.

    It must depend on its arguments alone. Arguments that are not tensors are part of what is compiled.
    """
    return tf.function(fn, jit_compile=True, autograph=False)


def batch_independent(fn: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """See `Kernels`.

    TensorFlow computes rsqrt, log, reciprocal and the like 16 numbers at a time, and the remainder by another
    algorithm, which rounds differently. With 16 copies of each number there is no remainder.
    """
    return fn(tf.tile(x, [1] * (x.shape.rank - 1) + [16]))[..., :1]


# --- products


def product(x: tf.Tensor, w_MH: tf.Tensor) -> tf.Tensor:
    """See `Kernels`; a plain product, whose gradients transpose nothing."""
    y = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), w_MH)
    y = tf.reshape(y, tf.concat([tf.shape(x)[:-1], [w_MH.shape[-1]]], 0))
    return tf.ensure_shape(y, [*x.shape[:-1], w_MH.shape[-1]])


def experts_feed_forward(
    x_EGCM: tf.Tensor,
    weights: NestedMap,
    activation: Activation,
    drop: Drop | None,
    shard: Shard,
    keep_hidden: Keep | None = None,
) -> tf.Tensor:
    """See `Kernels`.

    TensorFlow's gradient of an einsum gives [E,H,M] for weights [E,M,H], and transposes that at more than the
    product's cost where experts are many; a batched product's comes out as it is. Where each expert has few rows, a
    transposed weight is the slowest operand, so the small result is transposed instead; and a product for each expert
    is faster than a batched one, as long as its result stays in the cache until it is used. That holds for the hidden
    layer, but not for the weights' gradients, which would have to be joined.
    """
    del shard
    experts, groups, slots, width = shape_of(x_EGCM)
    as_one = drop is None and keep_hidden is None
    if as_one and weights.wo.shape[0] <= _MANY_EXPERTS and _is_few(groups * slots):
        x_ERM = tf.reshape(x_EGCM, [experts, groups * slots, width])
        return tf.reshape(_each_expert(x_ERM, weights, activation), [experts, groups, slots, width])
    products = [_expert_product(x_EGCM, weights[name]) for name in activation.weights]
    if keep_hidden is not None:
        products = [keep_hidden(product) for product in products]
    h_EGCH = activation.function(*products)
    return _expert_product(h_EGCH if drop is None else drop(h_EGCH), weights.wo)


def _expert_product(x_EGCM: tf.Tensor, w_EMH: tf.Tensor) -> tf.Tensor:
    """Each expert's slots times its matrix, [E,G,C,H]."""
    experts, groups, slots, width = shape_of(x_EGCM)
    y_ERH = _batched(tf.reshape(x_EGCM, [experts, groups * slots, width]), w_EMH)
    return tf.reshape(y_ERH, [experts, groups, slots, w_EMH.shape[-1]])


@tf.custom_gradient
def _batched(x_ERM: tf.Tensor, w_EMH: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def grad(dy_ERH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        dx_ERM = _by_transposed(dy_ERH, w_EMH)
        return dx_ERM, tf.matmul(x_ERM, dy_ERH, transpose_a=True)

    return tf.matmul(x_ERM, w_EMH), grad


def _each_expert(x_ERM: tf.Tensor, weights: NestedMap, activation: Activation) -> tf.Tensor:
    """The experts' results [E,R,M] by a product for each expert."""

    @tf.custom_gradient
    def run(x_ERM: tf.Tensor, wo_EHM: tf.Tensor, *wi: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        rows, wo = tf.unstack(x_ERM, wo_EHM.shape[0]), tf.unstack(wo_EHM)
        products = [
            [tf.matmul(x_RM, wi_MH) for x_RM, wi_MH in zip(rows, tf.unstack(w), strict=True)]
            for w in wi
        ]
        hidden = [activation.function(*each) for each in zip(*products, strict=True)]
        outputs = [tf.matmul(h_RH, wo_HM) for h_RH, wo_HM in zip(hidden, wo, strict=True)]

        def grad(dy_ERM: tf.Tensor) -> tuple[tf.Tensor, ...]:
            stacked = [tf.stack(each) for each in products]
            with tf.GradientTape() as tape:
                tape.watch(stacked)
                h_ERH = activation.function(*stacked)
            dh = tape.gradient(h_ERH, stacked, _by_transposed(dy_ERM, wo_EHM))
            dx = tf.add_n([_by_transposed(d, w) for d, w in zip(dh, wi, strict=True)])
            dwo_EHM = tf.matmul(h_ERH, dy_ERM, transpose_a=True)
            return dx, dwo_EHM, *[tf.matmul(x_ERM, d, transpose_a=True) for d in dh]

        return tf.stack(outputs), grad

    return run(x_ERM, weights.wo, *(weights[name] for name in activation.weights))


def _by_transposed(dy_ERH: tf.Tensor, w_EMH: tf.Tensor) -> tf.Tensor:
    """Each expert's rows times its transposed matrix, [E,R,M]."""
    if _is_few(dy_ERH.shape[1]):
        return tf.linalg.matrix_transpose(tf.matmul(w_EMH, dy_ERH, transpose_b=True))
    return tf.matmul(dy_ERH, w_EMH, transpose_b=True)


def _is_few(rows: int | tf.Tensor | None) -> bool:
    return isinstance(rows, int) and rows <= _FEW_ROWS


def grouped_matmul(
    rows_RM: tf.Tensor,
    weights_EMH: tf.Tensor,
    group_sizes_E: tf.Tensor,
    rows_expected: int | None,
) -> tf.Tensor:
    """See `Kernels`; a product for each group, of as many rows as it has."""
    return grouped.by_group(rows_RM, weights_EMH, group_sizes_E, rows_expected)


def stable_order(key: tf.Tensor) -> tf.Tensor:
    """See `Kernels`."""
    return tf.argsort(key, stable=True)


# --- attention


def project_heads(
    query: tf.Tensor, source: tf.Tensor, weights: NestedMap, scale: float, shard: Shard
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `Kernels`; [B,N,T,K] and twice [B,A,S,K].

    An einsum over [B,T,N,K] makes TensorFlow move each operand so that B and N lead, in forward and backward, and each
    of the three projections reads the input again. Here one product makes all of a kind, and one transposition brings
    them where the products over S and K need them.
    """
    del shard
    wq, wk, wv = (tf.cast(w, query.dtype) for w in (weights.q, weights.k, weights.v))
    wq *= tf.constant(scale, wq.dtype)
    if query is source and wq.shape == wk.shape:
        q, k, v = _project(query, [wq, wk, wv])
    else:
        (q,) = _project(query, [wq])
        k, v = _project(source, [wk, wv])
    return q, k, v


def _project(x: tf.Tensor, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """x [B,T,M] by each of the weights [M,N,K]: a list of [B,N,T,K]."""
    batch, time = shape_of(x)[:2]
    dim, heads, size = weights[0].shape
    num = len(weights)
    joined = tf.reshape(tf.concat(weights, axis=1), [dim, num * heads * size])
    y = tf.matmul(tf.reshape(x, [-1, dim]), joined)
    y = tf.reshape(y, [batch, time, num, heads, size])
    return tf.unstack(tf.transpose(y, [2, 0, 3, 1, 4]))


def attention_probabilities(q: tf.Tensor, k: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """See `Kernels`."""
    bias = (1.0 - tf.cast(mask, tf.float32)) * _MASKED
    scores = tf.cast(_by_kv_head(q, k, transpose_b=True), tf.float32)
    return _softmax(scores, bias[:, tf.newaxis])


def combine_heads(probs: tf.Tensor, v: tf.Tensor, o_NKM: tf.Tensor) -> tf.Tensor:
    """See `Kernels`."""
    heads, size, dim = o_NKM.shape
    y = tf.transpose(_by_kv_head(probs, v), [0, 2, 1, 3])
    batch, time = shape_of(y)[:2]
    o = tf.reshape(tf.cast(o_NKM, probs.dtype), [heads * size, dim])
    return tf.reshape(tf.matmul(tf.reshape(y, [-1, heads * size]), o), [batch, time, dim])


def _by_kv_head(x: tf.Tensor, y: tf.Tensor, transpose_b: bool = False) -> tf.Tensor:
    """x [B,N,T,a] times y [B,A,a,b] (or [B,A,b,a]), head by head: [B,N,T,b]. The heads that share a matrix are rows of
    one product."""
    heads, shared = x.shape[1], y.shape[1]
    if heads == shared:
        return tf.matmul(x, y, transpose_b=transpose_b)
    batch, _, time, width = tf.unstack(tf.shape(x))
    rows = tf.reshape(x, [batch, shared, heads // shared * time, width])
    out = tf.matmul(rows, y, transpose_b=transpose_b)
    joined = tf.reshape(out, [batch, heads, time, tf.shape(out)[3]])
    joined.set_shape([*x.shape[:3], out.shape[3]])
    return joined


@tf.custom_gradient
def _softmax(scores: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    probs = tf.nn.softmax(scores + bias)

    def grad(dprobs: tf.Tensor) -> tuple[tf.Tensor, None]:
        return _softmax_grad(probs, dprobs), None

    return probs, grad


@fused
def _softmax_grad(probs: tf.Tensor, dprobs: tf.Tensor) -> tf.Tensor:
    return probs * (dprobs - tf.reduce_sum(probs * dprobs, axis=-1, keepdims=True))


# --- normalization and dropout


def normalize(
    x: tf.Tensor, scale_M: tf.Tensor, bias_M: tf.Tensor | None, epsilon: float
) -> tf.Tensor:
    """See `Kernels`; a gradient of two fused passes, and sums over tokens as products."""
    centre = bias_M is not None

    @tf.custom_gradient
    def run(x: tf.Tensor, scale: tf.Tensor, *bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        per_element = 1.0 / x.shape[-1]
        if centre:
            x -= tf.reduce_sum(x, axis=-1, keepdims=True) * per_element
        mean_square = tf.reduce_sum(x * x, axis=-1, keepdims=True) * per_element
        inverse = batch_independent(tf.math.rsqrt, mean_square + epsilon)
        normal = x * inverse

        def grad(dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
            dx, terms = _normalize_grad(dy, normal, inverse, scale, centre)
            return dx, _sum_tokens(terms), *[_sum_tokens(dy) for _ in bias]

        return sum(bias, normal * scale), grad

    weights = [scale_M] if bias_M is None else [scale_M, bias_M]
    return run(x, *(tf.cast(w, tf.float32) for w in weights))


@fused
def _normalize_grad(
    dy: tf.Tensor, normal: tf.Tensor, inverse: tf.Tensor, scale: tf.Tensor, centre: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """The gradient of x, and the terms whose sum over tokens is the scale's."""
    terms = dy * normal
    dnormal = dy * scale
    per_element = 1.0 / normal.shape[-1]
    along = tf.reduce_sum(dnormal * normal, -1, keepdims=True) * per_element
    if centre:
        mean = tf.reduce_sum(dnormal, -1, keepdims=True) * per_element
        return inverse * (dnormal - mean - normal * along), terms
    return inverse * (dnormal - normal * along), terms


def _sum_tokens(x: tf.Tensor) -> tf.Tensor:
    """[..., M] to [M]."""
    flat = tf.reshape(x, [-1, x.shape[-1]])
    return tf.reshape(tf.matmul(tf.ones([1, tf.shape(flat)[0]]), flat), [-1])


def dropout(x: tf.Tensor, rate: float, seed: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    """See `kernels.dropout`; unfused, the hash alone would take sixty passes."""

    @tf.custom_gradient
    def drop(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        y, kept = _fused_drop(x, seed, rate, rows)
        return y, lambda dy: _fused_keep(dy, kept, rate)

    return drop(x)


@fused
def _fused_drop(
    x: tf.Tensor, seed: tf.Tensor, rate: float, rows: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    kept = randomness.kept(seed, x.shape, rate, rows)
    return xla.keep(x, kept, rate), kept


_fused_keep = fused(xla.keep)


# --- losses


def token_losses(
    x: tf.Tensor,
    table_VM: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    label_smoothing: float,
    shard: Shard,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `Kernels`.

    The logits are the largest tensor of a training step: 64 MB where an activation is 2. Each operation that touches
    them costs as much as a layer, so they are read three times and written once beside the products, and all else is
    computed on [R,M] and [V,M], R the tokens. In other types than float32 the kernels for XLA run.
    """
    if not x.dtype == table_VM.dtype == tf.float32:
        return xla.token_losses(x, table_VM, labels, weights, label_smoothing, shard)
    flat_x, flat_labels = tf.reshape(x, [-1, x.shape[-1]]), tf.reshape(labels, [-1])
    each = _token_losses(label_smoothing)(flat_x, table_VM, flat_labels)
    xent, nll, correct = (
        tf.reshape(loss, tf.shape(labels)) * tf.cast(weights, tf.float32) for loss in each
    )
    return xent, nll, correct


def _token_losses(label_smoothing: float) -> Callable:
    @tf.custom_gradient
    def run(x: tf.Tensor, table: tf.Tensor, labels: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        num = table.shape[0]
        on, off = 1.0 - label_smoothing, label_smoothing / num
        scores = tf.matmul(x, table, transpose_b=True)
        probs = tf.nn.softmax(scores)
        best = tf.reduce_max(scores, -1)
        # From the largest probability, at least 1/V, where a label's own may be 0 in float32.
        partition = best - tf.math.log(tf.reduce_max(probs, -1))
        picked = tf.gather(scores, labels, batch_dims=1)
        summed = tf.reduce_sum(table, 0, keepdims=True)
        xent = partition - on * picked
        if label_smoothing:
            xent -= off * tf.reduce_sum(x * summed, -1)
        correct = tf.cast(picked >= best, tf.float32)

        def grad(dxent: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, None]:
            """The logits' is dxent (probs - target), target = on at the label and off everywhere; the contribution of
            the target to the products needs no matrix of that size."""
            each = dxent[:, tf.newaxis]
            scaled = each * x
            dx = tf.matmul(probs, table) - on * tf.gather(table, labels)
            dtable = tf.matmul(probs, scaled, transpose_a=True)
            dtable = tf.tensor_scatter_nd_sub(dtable, labels[:, tf.newaxis], on * scaled)
            if label_smoothing:
                dx -= off * summed
                dtable -= off * tf.reduce_sum(scaled, 0, keepdims=True)
            return each * dx, dtable, None

        return [xent, partition - picked, correct], grad

    return run


# --- optimizer and training step


@dataclass(frozen=True)
class _AppliedDelta:
    """A `Delta` whose new weight was computed with the update."""

    new: tf.Tensor
    square: tf.Tensor
    grad_square: tf.Tensor

    def SumOfSquares(self) -> tf.Tensor:
        return self.square

    def SubtractFrom(self, weight: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.new, weight.dtype)


def adafactor(
    weight: tf.Tensor, grad: tf.Tensor, slots: NestedMap, recipe: AdafactorRecipe
) -> tuple[Delta, NestedMap]:
    """See `Kernels`; in few passes where the moment is factored over the last two dimensions."""
    rank = weight.shape.rank
    if recipe.dims != (rank - 2, rank - 1):
        return xla.adafactor(weight, grad, slots, recipe)
    if not recipe.stack_dims:
        weights, grads, each = [weight], [grad], [slots]
    else:
        # Layer by layer: a layer that fits in a cache is read faster.
        num = weight.shape[0]
        weights, grads = [weight[i] for i in range(num)], [grad[i] for i in range(num)]
        rows, cols = tf.unstack(slots.row), tf.unstack(slots.col)
        each = [NestedMap(row=r, col=c) for r, c in zip(rows, cols, strict=True)]
    parts = [_factors(*part, recipe) for part in zip(weights, grads, each, strict=True)]
    factors = [part.factors for part in parts]
    new = _subtract(weights, grads, factors, bool(recipe.stack_dims))
    new_slots = parts[0].slots
    if recipe.stack_dims:
        names = ("row", "col")
        new_slots = NestedMap({n: tf.stack([part.slots[n] for part in parts]) for n in names})
    square = tf.add_n([part.square for part in parts])
    return _AppliedDelta(new, square, tf.add_n([part.grad_square for part in parts])), new_slots


def _factors(
    weight: tf.Tensor, grad: tf.Tensor, slots: NestedMap, recipe: AdafactorRecipe
) -> NestedMap:
    """For a weight [..., R, C] of one layer: `factors` (a [..., R], b [..., C]), so that a b grad is to be subtracted;
    `slots`, the new ones; and the sums of squares of that product and of grad.

    The update u is the product of the gradient g and two vectors, so that sum u^2 = a^2 . g^2 . b^2: the same matrix
    product that sums the columns of g^2 gives it, and u itself is never written.
    """
    rows, columns = grad.shape[-2:]
    square = tf.square(grad)
    sums = tf.reduce_sum(square, -1)
    row = recipe.Average(slots.row, sums * (1.0 / columns) + recipe.epsilon1)
    a_square = tf.reduce_mean(row, -1, keepdims=True) / row
    both = tf.matmul(tf.stack([tf.fill(tf.shape(row), 1.0 / rows), a_square], -2), square)
    means, weighted = tf.unstack(both, axis=-2)
    col = recipe.Average(slots.col, means + recipe.epsilon1)
    total = tf.reduce_sum(weighted / col)
    per_element = 1.0 / math.prod(weight.shape)
    scale = recipe.rate
    if recipe.clip_threshold:
        excess = tf.sqrt(total * per_element) * (1.0 / recipe.clip_threshold)
        scale *= tf.math.reciprocal(tf.maximum(excess, 1.0))
    if recipe.multiply_by_parameter_scale:
        size = tf.sqrt(tf.nn.l2_loss(weight) * (2.0 * per_element))
        scale *= tf.maximum(size, recipe.epsilon2)
    return NestedMap(
        factors=[tf.sqrt(a_square) * scale, tf.math.rsqrt(col)],
        slots=NestedMap(row=row, col=col),
        square=total * tf.square(scale),
        grad_square=tf.reduce_sum(sums),
    )


@fused
def _subtract(
    weights: list[tf.Tensor], grads: list[tf.Tensor], factors: list[list[tf.Tensor]], stack: bool
) -> tf.Tensor:
    """weight [..., R, C] - a [..., R] grad b [..., C], of each layer; `stack`: all in one tensor."""
    new = [
        weight - grad * a[..., tf.newaxis] * b[..., tf.newaxis, :]
        for weight, grad, (a, b) in zip(weights, grads, factors, strict=True)
    ]
    return tf.stack(new) if stack else new[0]


def sum_of_squares(x: tf.Tensor) -> tf.Tensor:
    """See `Kernels`; in one pass."""
    return 2.0 * tf.nn.l2_loss(x)


def slices(stacks: Sequence[tf.Tensor], num: int) -> list[list[tf.Tensor]]:
    """See `Kernels`; together, so that the gradient is one stack, not a sum of arrays that are zero but for a slice."""
    unstacked = [tf.unstack(stack, num) for stack in stacks]
    return [[layers[i] for layers in unstacked] for i in range(num)]


def with_row(rows: tf.Tensor, i: tf.Tensor, row: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """See `Kernels`."""
    here = tf.reshape(tf.range(rows.shape[axis]) == i, [-1] + [1] * (rows.shape.rank - axis - 1))
    return tf.where(here, tf.expand_dims(row, axis), rows)


def select(condition: tf.Tensor, new: list[tf.Tensor], old: list[tf.Tensor]) -> list[tf.Tensor]:
    """See `Kernels`; a branch, which copies nothing."""
    return list(tf.cond(condition, lambda: new, lambda: old))
