"""Operations whose results and gradients must be right under every pair of shardings, see sharding_pairs.py.

Those of the conformance page, in its order. Of 13 rows and 8 columns one dimension does not divide evenly.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import floats, ints

X, SQUARE = floats(13, 8), floats(8, 8)
ROWS, COLUMNS = ints(7, below=13), ints(7, below=8)
PLACES = np.stack([ROWS, COLUMNS], -1)
SOME_ROWS = np.array([[12], [3], [7], [11], [8]], np.int32)  # each once
IMAGE, KERNEL = floats(2, 8, 4, 4), floats(3, 3, 4, 4)
SIGNAL, TAPS = floats(4, 16, 4), floats(3, 4, 8)

Operation = tuple[Any, ...]  # a function without annotations, and its arguments


def positive(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * tf.abs(x) + 0.5


def loop(body: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    start = (tf.constant(0), x)
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, y: (i + 1, body(y)), start, maximum_iterations=3
    )[1]


def normalized(x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x + 5.0, [0])
    return (x + 5.0 - mean) * tf.math.rsqrt(variance + 1e-3)


def conv(stride: int, padding: str = "SAME", dilation: int = 1) -> Operation:
    fn = lambda x, k: tf.nn.conv1d(x, k, stride, padding, dilations=dilation)  # noqa: E731
    return fn, SIGNAL, TAPS


PRODUCTS: dict[str, Operation] = {
    "elementwise": (lambda x: tf.nn.softplus(tf.tanh(x) ** 2 + 1.0) / (1.0 + x * x), X),
    "select": (lambda x: tf.where(x > 0, tf.clip_by_value(x, -1.0, 1.0), 2 * x), X),
    "broadcast_into_rows": (lambda x, b: x * b + b, X, floats(8)),
    "broadcast": (lambda x: tf.broadcast_to(x[:, None], [13, 4]), floats(13)),
    "matmul": (tf.matmul, X, floats(8, 5)),
    "matmul_of_transposed": (lambda x, w: tf.matmul(x, w, transpose_a=True), X, floats(13, 5)),
    "matmul_in_batches": (tf.matmul, floats(4, 6, 8), floats(4, 8, 4)),
    "outer_product": (lambda x, w: tf.einsum("i,j->ij", x, w), floats(13), floats(8)),
    "dot": (lambda x, w: tf.einsum("ij,ij->", x, w), X, floats(13, 8, seed=1)),
    "loop": (lambda x: loop(lambda y: 1.1 * tf.tanh(y) + 0.1, x), X),
    "loop_of_products": (lambda x, w: loop(lambda y: tf.tanh(y @ w), x), X, floats(8, 8)),
    "branch": (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x), lambda: x * x), X),
}

REDUCTIONS: dict[str, Operation] = {
    "sum": (lambda x: tf.reduce_sum(x, 0), X),
    "mean": (lambda x: tf.reduce_mean(x, 0), X),
    "prod": (lambda x: tf.reduce_prod(positive(x), 0), X),
    "max": (lambda x: tf.reduce_max(-positive(x), 0), X),
    "min": (lambda x: tf.reduce_min(positive(x), 0), X),
    "logsumexp": (lambda x: tf.reduce_logsumexp(-9 * positive(x), 0), X),
    "softmax": (lambda x: tf.nn.softmax(x, 0), X),
    "log_softmax": (lambda x: tf.nn.log_softmax(x, 0), X),
    "normalization": (normalized, X),
    "cumsum": (lambda x: tf.cumsum(x, 0), X),
    "cumsum_exclusive_reverse": (lambda x: tf.cumsum(x, 0, exclusive=True, reverse=True), X),
    "cumprod": (lambda x: tf.math.cumprod(positive(x), 0), X),
    "cumulative_logsumexp": (lambda x: tf.math.cumulative_logsumexp(x, 0), X),
    "argmax": (lambda x: tf.argmax(x, 0, output_type=tf.int32), X),
    "top_k": (lambda x: tf.math.top_k(x, 4)[0], X),
    "sort": (lambda x: tf.sort(x, 0), X),
}

INDICES: dict[str, Operation] = {
    "one_hot": (lambda i: tf.one_hot(i, 9), ROWS),
    "gather": (tf.gather, X, ROWS),
    "gather_columns": (lambda x, i: tf.gather(x, i, axis=1), X, COLUMNS),
    "gather_in_batches": (lambda x, i: tf.gather(x, i, batch_dims=1), X, ints(13, 5, below=8)),
    "gather_nd": (tf.gather_nd, X, PLACES),
    "reverse_sequence": (lambda x, n: tf.reverse_sequence(x, n, seq_axis=0, batch_axis=1), X, 1 + ints(8, below=13)),
    "scatter_add": (tf.tensor_scatter_nd_add, X, ROWS[:, None], floats(7, 8)),
    "scatter_update": (tf.tensor_scatter_nd_update, X, SOME_ROWS, floats(5, 8)),
    "scatter_max": (tf.tensor_scatter_nd_max, X, SOME_ROWS, floats(5, 8)),
    "scatter_nd": (lambda u, i: tf.scatter_nd(i, u, [7, 8]), X, ints(13, 1, below=7)),
    "segment_sum": (lambda u, i: tf.math.unsorted_segment_sum(u, i, 5), X, ints(13, below=5)),
    "segment_max": (lambda u, i: tf.math.unsorted_segment_max(-positive(u), i, 4), X, ints(13, below=4)),
    "slice_from_runtime_start": (lambda x, start: tf.slice(x, start, [5, 4]), X, np.array([3, 2], np.int32)),
}  # fmt: skip

FORMATTING: dict[str, Operation] = {
    "slice": (lambda x: x[3:11, 1:], X),
    "row": (lambda x: x[5], X),
    "pad_low": (lambda x: tf.pad(x, [[3, 0], [0, 1]]), X),
    "pad_with_7": (lambda x: tf.pad(x, [[1, 8], [0, 0]], constant_values=7.0), X),
    "pad_reflect": (lambda x: tf.pad(x, [[2, 3], [0, 0]], mode="REFLECT"), X),
    "pad_symmetric": (lambda x: tf.pad(x, [[2, 3], [0, 0]], mode="SYMMETRIC"), X),
    "reshape_merge": (lambda x: tf.reshape(x, [104]), X),
    "reshape_divide": (lambda x: tf.reshape(x, [13, 8]), floats(104)),
    "reshape_across_rows": (lambda x: tf.reshape(x, [8, 13]), X),
    "transpose": (tf.transpose, X),
    "reverse": (lambda x: tf.reverse(x, [0]), X),
    "roll": (lambda x: tf.roll(x, 5, 0), X),
    "tile": (lambda x: tf.tile(x, [2, 1]), X),
    "repeat": (lambda x: tf.repeat(x, 2, axis=0), X),
    "concat": (lambda x, y: tf.concat([x, y, x], 0), X, floats(3, 8)),
    "concat_columns": (lambda x, y: tf.concat([x, y], 1), X, floats(13, 3)),
    "stack": (lambda x: tf.stack([x, x + 1], 1), floats(13)),
    "unstack": (lambda x: tf.add_n([y * (i + 1.0) for i, y in enumerate(tf.unstack(x))]), SQUARE),
    "split": (lambda x: tf.concat(tf.split(x, [4, 3, 6], 0)[::-1], 0), X),
    "shift": (lambda x: tf.pad(x[:-1], [[1, 0], [0, 0]]), X),
    "diagonal": (tf.linalg.diag_part, X),
    "diagonal_matrix": (tf.linalg.diag, floats(13)),
    "band_part": (lambda x: tf.linalg.band_part(x, 1, 2), X),
}

WINDOWS: dict[str, Operation] = {
    "conv": conv(1),
    "conv_stride_2": conv(2),
    "conv_valid": conv(2, "VALID"),
    "conv_dilated": conv(1, "SAME", 2),
    "conv_of_images": (lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), IMAGE, KERNEL),
    "conv_transposed": (lambda x, k: tf.nn.conv2d_transpose(x, k, [2, 16, 8, 4], 2, "SAME"), IMAGE, KERNEL),
    "max_pooling": (lambda x: tf.nn.max_pool1d(x, 3, 2, "SAME"), SIGNAL),
    "average_pooling": (lambda x: tf.nn.avg_pool1d(x, 2, 2, "SAME"), SIGNAL),
}  # fmt: skip

OPERATIONS = PRODUCTS | REDUCTIONS | INDICES | FORMATTING | WINDOWS
