"""The kernels for TensorFlow's own kernels: few products, few transpositions, few passes over memory.

What each function computes is said in `Kernels` (`__init__.py`). They run on one device, so nothing is annotated.
Letters as there; R also counts rows.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.kernels import (
    blockwise,
    grouped_matmul as grouped,
    tensorflow_adafactor,
    tensorflow_losses,
    xla,
)
from lingvo_moe.core.kernels.scores import MASKED, Seen, softmax_beside
from lingvo_moe.core.kernels.weights import Heads, Matrix, Weight
from lingvo_moe.core.kernels.without_avx512 import (
    matmul,
    matmul_by_expert,
    product_for,
    weight_gradient,
)
from lingvo_moe.core.kernels.xla import Activation, CacheShape, Drop, Keep, Shard
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.tensors import dim, fused, open_shape, shape_of

# Where each expert has few rows, the weights decide what a product costs (see `experts_feed_forward`).
_FEW_ROWS = 128
_MANY_EXPERTS = 256  # with more, a product for each would be a large graph

cross_entropy = xla.cross_entropy
seen_positions = xla.seen_positions
adafactor = tensorflow_adafactor.adafactor
token_losses = tensorflow_losses.token_losses


def batch_independent(fn: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """See `Kernels`.

    TensorFlow computes rsqrt, log, reciprocal and the like 16 numbers at a time, and the remainder by another
    algorithm, which rounds differently. With 16 copies of each number there is no remainder.
    """
    return fn(tf.tile(x, [1] * (x.shape.rank - 1) + [16]))[..., :1]


# --- products


def product(x: tf.Tensor, w_MH: Weight) -> tf.Tensor:
    """See `Kernels`; a plain product, whose gradients transpose nothing."""
    rows = tf.reshape(x, [-1, x.shape[-1]])
    y = w_MH.Product(rows) if isinstance(w_MH, Matrix) else matmul(rows, w_MH)
    return tf.reshape(y, [*open_shape(x)[:-1], dim(y, 1)])


def logits(x: tf.Tensor, table_VM: Weight, shard: Shard) -> tf.Tensor:
    """See `Kernels`; a packed table is transposed, [M,V].

    Where oneDNN has no product of a type, e.g. of bfloat16 without AVX-512, an einsum takes TensorFlow over 20 times as
    long as a plain product.
    """
    if isinstance(table_VM, Matrix):
        return tf.cast(product(x, table_VM), tf.float32)
    if x.dtype == tf.float32:
        return xla.logits(x, table_VM, shard)
    rows = tf.reshape(x, [-1, x.shape[-1]])
    y = tf.matmul(rows, tf.cast(table_VM, x.dtype), transpose_b=True)
    return tf.cast(tf.reshape(y, [*open_shape(x)[:-1], dim(y, 1)]), tf.float32)


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


@private.custom_gradient
def _batched(x_ERM: tf.Tensor, w_EMH: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def grad(dy_ERH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        dx_ERM = _by_transposed(dy_ERH, w_EMH)
        return dx_ERM, weight_gradient(x_ERM, dy_ERH)

    experts, _, columns = w_EMH.shape
    if experts > _MANY_EXPERTS or product_for(x_ERM.shape[1], columns) is tf.matmul:
        return tf.matmul(x_ERM, w_EMH), grad
    return tf.stack(matmul_by_expert(tf.unstack(x_ERM, experts), w_EMH)), grad


def _each_expert(x_ERM: tf.Tensor, weights: NestedMap, activation: Activation) -> tf.Tensor:
    """The experts' results [E,R,M] by a product for each expert."""

    @private.custom_gradient
    def run(x_ERM: tf.Tensor, wo_EHM: tf.Tensor, *wi: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        products = [matmul_by_expert(tf.unstack(x_ERM, wo_EHM.shape[0]), w) for w in wi]
        hidden = [activation.function(*of_one) for of_one in zip(*products, strict=True)]
        outputs = matmul_by_expert(hidden, wo_EHM)

        def grad(dy_ERM: tf.Tensor) -> tuple[tf.Tensor, ...]:
            stacked = [tf.stack(of_experts) for of_experts in products]
            with tf.GradientTape() as tape:
                tape.watch(stacked)
                h_ERH = activation.function(*stacked)
            dh = tape.gradient(h_ERH, stacked, _by_transposed(dy_ERM, wo_EHM))
            dx = tf.add_n([_by_transposed(d, w) for d, w in zip(dh, wi, strict=True)])
            dwo_EHM = weight_gradient(h_ERH, dy_ERM)
            return dx, dwo_EHM, *[weight_gradient(x_ERM, d) for d in dh]

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
    rows_RM: tf.Tensor, weights_EMH: tf.Tensor, group_sizes_E: tf.Tensor, rows_expected: int | None
) -> tf.Tensor:
    """See `Kernels`; a product for each group, of as many rows as it has."""
    return grouped.by_group(rows_RM, weights_EMH, group_sizes_E, rows_expected, product_for)


def sort_rows(
    group_N: tf.Tensor, groups: int, fewest: int = 1
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `Kernels`."""
    if fewest == 1:
        return xla.sort_rows(group_N, groups)
    (count,) = shape_of(group_N)
    rows_E = tf.math.unsorted_segment_sum(tf.ones_like(group_N), group_N, groups + 1)[:groups]
    sizes_E = tf.where(rows_E > 0, tf.maximum(rows_E, fewest), 0)
    # Some rows more for each group; those that it does not need come after all others.
    more = tf.range(1, fewest)[:, tf.newaxis]
    more = tf.where(rows_E + more <= sizes_E, tf.range(groups), groups + 1)
    owner = tf.concat([group_N, tf.reshape(more, [-1])], 0)
    number = tf.range(count + (fewest - 1) * groups)
    order = tf.concat(tf.dynamic_partition(number, owner, groups + 2), 0)
    order = tf.ensure_shape(order, number.shape)
    place_N, used = tf.math.invert_permutation(order)[:count], tf.reduce_sum(sizes_E)
    if not isinstance(count, int) or not count:  # no static shape: the places of groups, or one
        most = tf.maximum(used, tf.minimum(count, 1))
        order, number = order[:most], number[:most]
    return place_N, tf.where((order < count) & (number < used), order, -1), sizes_E


# --- attention

# Heads lead, [N,B,T,K]: so the products over S and K need them, and products with packed weights give them. A step of a
# search writes a row of a cache for each head and batch row; X = J K has its J hypotheses.
MEMORY, CACHE = "NBSK", "NBLX"


def project_heads(
    query: tf.Tensor | None,
    source: tf.Tensor | None,
    weights: NestedMap,
    scale: float,
    shard: Shard,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `Kernels`.

    An einsum over [B,T,N,K] makes TensorFlow move each operand so that B and N lead, in forward and backward, and each
    of the three projections reads the input again. Here one product makes all of a kind, and one transposition brings
    them where the products over S and K need them.
    """
    q = k = v = None
    if query is source and query is not None:
        if "qkv" in weights:
            q, k, v = weights.qkv.Project(query)
            return q, k, v
        if "k" in weights and weights.q.shape == weights.k.shape:
            wq = _scaled(tf.cast(weights.q, query.dtype), scale)
            q, k, v = _project(query, [wq, weights.k, weights.v])
            return q, k, v
    if query is not None:
        packed = weights.get("qkv", weights.get("q"))
        if isinstance(packed, Heads):
            q = packed.Project(query)[0]
        else:
            q = _project(query, [_scaled(tf.cast(weights.q, query.dtype), scale)])[0]
    if source is not None:
        packed = weights.get("qkv", weights.get("kv"))
        if isinstance(packed, Heads):
            *_, k, v = packed.Project(source)
        else:
            k, v = _project(source, [weights.k, weights.v])
    return q, k, v


def _scaled(x: tf.Tensor, scale: float) -> tf.Tensor:
    return x * tf.constant(scale, x.dtype)


def _project(x: tf.Tensor, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """x [B,T,M] by each of the weights [M,N,K]: a list of [N,B,T,K]."""
    batch, time = shape_of(x)[:2]
    width, heads, size = weights[0].shape
    num = len(weights)
    joined = tf.concat([tf.cast(w, x.dtype) for w in weights], axis=1)
    y = matmul(tf.reshape(x, [-1, width]), tf.reshape(joined, [width, num * heads * size]))
    y = tf.reshape(y, [batch, time, num, heads, size])
    return tf.unstack(tf.transpose(y, [2, 3, 0, 1, 4]))


def per_head(x_BTK: tf.Tensor) -> tf.Tensor:
    return x_BTK[tf.newaxis]


def in_layout(x_BTNK: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x_BTNK, [2, 0, 1, 3])


def out_of_layout(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [1, 2, 0, 3])


def attend(
    q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen, drop: Drop | None = None
) -> tf.Tensor:
    """See `Kernels`; the heads that share keys and values are rows of one product, and rows go by blocks."""
    if seen.mask is None and drop is None:
        q, k, v = (out_of_layout(x) for x in (q, k, v))
        return blockwise.attend(q, k, v, seen)
    heads, shared, sinks_N = q.shape[0], k.shape[0], seen.sinks_N
    masked, bias = (1.0 - tf.cast(seen.Mask(), tf.float32)) * MASKED, seen.BiasOfAll()
    if shared == heads:
        scores = tf.cast(tf.matmul(q, k, transpose_b=True), tf.float32)
        if bias is not None:
            scores += tf.transpose(bias, [1, 0, 2, 3])
        probs = _softmax_of(scores, masked, sinks_N)
        probs = tf.cast(probs, v.dtype)
        if drop is not None:
            probs = tf.transpose(drop(tf.transpose(probs, [1, 0, 2, 3])), [1, 0, 2, 3])
        return tf.transpose(tf.matmul(probs, v), [1, 2, 0, 3])
    times, keys = heads // shared, dim(k, 2)
    _, batch, time, size = shape_of(q)
    q_ABRTK = tf.transpose(tf.reshape(q, [shared, times, batch, time, size]), [0, 2, 1, 3, 4])
    rows = tf.reshape(q_ABRTK, [shared, batch, times * time, size])
    scores = tf.cast(tf.matmul(rows, k, transpose_b=True), tf.float32)
    scores_ABRTS = tf.reshape(scores, [shared, batch, times, time, keys])
    if bias is not None:
        rows_of_bias, heads_of_bias, *others = shape_of(bias)
        groups = [1, 1] if heads_of_bias == 1 else [shared, times]
        bias_BARTS = tf.reshape(bias, [rows_of_bias, *groups, *others])
        scores_ABRTS += tf.transpose(bias_BARTS, [1, 0, 2, 3, 4])
    if sinks_N is not None:
        sinks_N = tf.reshape(sinks_N, [shared, 1, times])
    probs = tf.cast(_softmax_of(scores_ABRTS, masked[:, tf.newaxis], sinks_N), v.dtype)
    if drop is not None:
        probs_BNTS = tf.reshape(tf.transpose(probs, [1, 0, 2, 3, 4]), [batch, heads, time, keys])
        probs = tf.reshape(drop(probs_BNTS), [batch, shared, times, time, keys])
        probs = tf.transpose(probs, [1, 0, 2, 3, 4])
    y = tf.matmul(tf.reshape(probs, [shared, batch, times * time, keys]), v)
    y = tf.transpose(tf.reshape(y, [shared, batch, times, time, size]), [1, 3, 0, 2, 4])
    return tf.reshape(y, [batch, time, heads, size])


def project_back(context_BTNK: tf.Tensor, o_NKM: Weight) -> tf.Tensor:
    batch, time, heads, size = open_shape(context_BTNK)
    x = tf.reshape(context_BTNK, [batch, time, heads * size])
    if isinstance(o_NKM, Matrix):
        return product(x, o_NKM)
    return product(x, tf.reshape(tf.cast(o_NKM, x.dtype), [heads * size, o_NKM.shape[-1]]))


def empty_cache(shape: CacheShape) -> tf.Tensor:
    sizes = [shape.heads, shape.batch, shape.length, shape.hypotheses * shape.size]
    # Made where the program runs: a constant of the program must not be written in place.
    x = tf.raw_ops.Empty(shape=tf.stack(sizes), dtype=shape.dtype, init=True)
    x.set_shape([n if isinstance(n, int) else None for n in sizes])
    return x


def write_cache(cache: tf.Tensor, new: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
    """See `Kernels`; the step's rows are written into the cache's memory."""
    shape = tf.shape(cache)
    _, batch, length, _ = tf.unstack(shape)
    end, width = cache.shape[0] * batch * length, cache.shape[3]
    if time.shape.rank:
        at = tf.reshape(tf.range(0, end, length)[:, tf.newaxis] + time, [-1])
    else:
        at = tf.range(time, end, length)
    # tf.tensor_scatter_nd_update copies the whole cache here.
    flat = tf.raw_ops.InplaceUpdate(
        x=tf.reshape(cache, [-1, width]), i=at, v=tf.reshape(new, [-1, width])
    )
    out = tf.reshape(flat, shape)
    out.set_shape(cache.shape)
    return out


def attend_cache(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen) -> tf.Tensor:
    """See `Kernels`; position t J + j of a row is hypothesis j at step t."""
    rows = dim(k, 1)
    k, v = (tf.reshape(c, [c.shape[0], rows, -1, q.shape[-1]]) for c in (k, v))
    return attend(q, k, v, seen)


def _softmax_of(scores: tf.Tensor, masked: tf.Tensor, sinks: tf.Tensor | None) -> tf.Tensor:
    """Probabilities of scores plus numbers that mask some; sinks, if any, have the leading dimensions of scores."""
    if sinks is None:
        return _softmax(scores, masked)
    ones = [1] * (scores.shape.rank - sinks.shape.rank)
    return softmax_beside(scores + masked, tf.reshape(sinks, [*sinks.shape, *ones]))


@private.custom_gradient
def _softmax(scores: tf.Tensor, masked: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    probs = tf.nn.softmax(scores + masked)

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

    @private.custom_gradient
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

    @private.custom_gradient
    def drop(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        y, stays = _fused_drop(x, seed, rate, rows)
        return y, lambda dy: _fused_scaled_where(stays, dy, rate)

    return drop(x)


@fused
def _fused_drop(
    x: tf.Tensor, seed: tf.Tensor, rate: float, rows: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    stays = randomness.kept(seed, x.shape, rate, rows)
    return xla.scaled_where(stays, x, rate), stays


_fused_scaled_where = fused(xla.scaled_where)


# --- optimizer and training step


def sum_of_squares(x: tf.Tensor) -> tf.Tensor:
    """See `Kernels`; in one pass."""
    return 2.0 * tf.nn.l2_loss(x)


def one_pass(fn: Callable[..., tuple], *args: tf.Tensor) -> tuple:
    """See `Kernels`; fused."""
    return fused(fn)(*args)


def slices(stacks: Sequence[tf.Tensor], num: int) -> list[list[tf.Tensor]]:
    """See `Kernels`; together, so that the gradient is one stack, not a sum of arrays that are zero but for a slice."""
    unstacked = [tf.unstack(stack, num) for stack in stacks]
    return [[layers[i] for layers in unstacked] for i in range(num)]


def select(condition: tf.Tensor, new: list[tf.Tensor], old: list[tf.Tensor]) -> list[tf.Tensor]:
    """See `Kernels`; a branch, which copies nothing."""
    return list(tf.cond(condition, lambda: new, lambda: old))
