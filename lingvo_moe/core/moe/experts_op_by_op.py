"""The experts for TensorFlow's own kernels (core/op_by_op.py).

TensorFlow's gradient of an einsum gives [E,H,M] for weights [E,M,H], and transposes that at more than the
product's cost where experts are many; a batched product's comes out as it is. Where each expert has few
rows, the weights decide what a product costs:

* one transposed is the slowest operand that there is, so the small result is transposed instead;
* a product for each expert is faster than a batched one, as long as what it makes stays in the cache
  until it is used: the hidden layer, but not the weights' gradients, which would have to be joined.

Letters: G group, E expert, C capacity slot, N rows of an expert, M model, H hidden.
"""

from collections.abc import Callable

import tensorflow as tf

from lingvo_moe.core.moe.packing import shape_of

_FEW_ROWS = 128
MANY_EXPERTS = 256  # a product for each would be a large graph


def feed_forward(x_EGCM: tf.Tensor, wi_EMH: tf.Tensor, wo_EHM: tf.Tensor) -> tf.Tensor:
    """relu(x wi) wo, [E,G,C,M]."""
    experts, groups, slots, width = shape_of(x_EGCM)
    if wi_EMH.shape[0] > MANY_EXPERTS or not _is_few(groups * slots):
        return product(tf.nn.relu(product(x_EGCM, wi_EMH)), wo_EHM)
    y_ENM = _each_expert(tf.reshape(x_EGCM, [experts, groups * slots, width]), wi_EMH, wo_EHM)
    return tf.reshape(y_ENM, [experts, groups, slots, width])


def product(x_EGCM: tf.Tensor, w_EMH: tf.Tensor) -> tf.Tensor:
    """Each expert's slots times its matrix, [E,G,C,H]."""
    experts, groups, slots, width = shape_of(x_EGCM)
    y_ENH = _batched(tf.reshape(x_EGCM, [experts, groups * slots, width]), w_EMH)
    return tf.reshape(y_ENH, [experts, groups, slots, w_EMH.shape[-1]])


@tf.custom_gradient
def _batched(x_ENM: tf.Tensor, w_EMH: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def grad(dy_ENH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        dx_ENM = _by_transposed(dy_ENH, w_EMH)
        return dx_ENM, tf.matmul(x_ENM, dy_ENH, transpose_a=True)

    return tf.matmul(x_ENM, w_EMH), grad


@tf.custom_gradient
def _each_expert(
    x_ENM: tf.Tensor, wi_EMH: tf.Tensor, wo_EHM: tf.Tensor
) -> tuple[tf.Tensor, Callable]:
    weights = zip(tf.unstack(wi_EMH), tf.unstack(wo_EHM), strict=True)
    hidden, outputs = [], []
    for x_NM, (wi_MH, wo_HM) in zip(tf.unstack(x_ENM, wi_EMH.shape[0]), weights, strict=True):
        hidden.append(tf.nn.relu(tf.matmul(x_NM, wi_MH)))
        outputs.append(tf.matmul(hidden[-1], wo_HM))

    def grad(dy_ENM: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        h_ENH = tf.stack(hidden)
        dh_ENH = tf.raw_ops.ReluGrad(gradients=_by_transposed(dy_ENM, wo_EHM), features=h_ENH)
        dwi_EMH = tf.matmul(x_ENM, dh_ENH, transpose_a=True)
        return _by_transposed(dh_ENH, wi_EMH), dwi_EMH, tf.matmul(h_ENH, dy_ENM, transpose_a=True)

    return tf.stack(outputs), grad


def _by_transposed(dy_ENH: tf.Tensor, w_EMH: tf.Tensor) -> tf.Tensor:
    """Each expert's rows times its transposed matrix, [E,N,M]."""
    if _is_few(dy_ENH.shape[1]):
        return tf.linalg.matrix_transpose(tf.matmul(w_EMH, dy_ENH, transpose_b=True))
    return tf.matmul(dy_ENH, w_EMH, transpose_b=True)


def _is_few(rows: int | tf.Tensor | None) -> bool:
    return isinstance(rows, int) and rows <= _FEW_ROWS
