"""Products of groups of rows with a matrix for each group, for experts with any number of rows.

`by_tiles` has static shapes: a loop over tiles of rows whose length follows the groups' sizes, as in block-sparse
products (Gale et al. 2022, "MegaBlocks", section 5). Rows that belong to no group, and experts without rows, cost
nothing. `by_group` makes a product for each group, of as many rows as it has. TPUs have a kernel in pallas/.

Letters: N rows, R rows of a tile, E expert, M and H the dimensions of a product.
"""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.private.tensorflow import gen_xla_ops

_MOST_ROWS = 256  # a tile of this many rows is no faster a product with more
_FEW_ROWS = 256  # TensorFlow packs a transposed matrix in the time of a product with so many rows
# (rows, columns) -> (rows [R,M], a matrix [M,H]) -> [R,H].
ProductFor = Callable[[int | None, int], Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]


def by_tiles(
    rows_NM: tf.Tensor,
    weights_EMH: tf.Tensor,
    group_sizes_E: tf.Tensor,
    rows_expected: int | None = None,
) -> tf.Tensor:
    """Each row times the matrix of its group, under XLA.

    Args:
        rows_NM: the rows of expert 0, then those of expert 1, ...; then any that belong to no expert. N is static.
        weights_EMH: in the type of the rows.
        group_sizes_E: int32, the number of rows of each expert; they sum to N at most.
        rows_expected: about how many rows belong to an expert, None for N. Only speed depends on it.

    Returns:
        [N,H]; zeros for rows without an expert. Gradients flow to rows and weights.

    Raises:
        ValueError: N is not static.
    """
    form = _Tiles(group_sizes_E, rows_NM.shape[0], rows_expected)
    return _multiply(form, rows_NM, weights_EMH)


def by_group(
    rows_NM: tf.Tensor,
    weights_EMH: tf.Tensor,
    group_sizes_E: tf.Tensor,
    rows_expected: int | None = None,
    product_for: ProductFor = lambda rows, columns: tf.matmul,
) -> tf.Tensor:
    """Multiplies each row by the matrix of its group with TensorFlow's own kernels; N may be unknown.

    Args:
        product_for: gives the product for about so many rows, None where nobody knows, and a matrix of so many columns.
    """
    rows = rows_NM.shape[0] if rows_expected is None else rows_expected
    rows = None if rows is None else rows // weights_EMH.shape[0]
    return _multiply(_Pieces(group_sizes_E, rows, product_for), rows_NM, weights_EMH)


def packed_feed_forward(
    rows_NM: tf.Tensor,
    group_sizes_E: tf.Tensor,
    feed_forward: Callable[[Any, tf.Tensor], tf.Tensor],
    in_loop: bool,
) -> tf.Tensor:
    """Takes each row [N,M] through its expert: [N,M].

    An expert's hidden layer is used while the processor's cache has it.

    Args:
        feed_forward: takes an expert and its rows [n,M], and returns [n,M].
        in_loop: whether it takes an expert that is a scalar tensor; then only those with rows take time. Else numbers.
    """
    if in_loop:
        return _of_experts_with_rows(rows_NM, group_sizes_E, feed_forward)
    *pieces, rest = _split(rows_NM, group_sizes_E)
    return tf.concat([*map(feed_forward, range(len(pieces)), pieces), tf.zeros_like(rest)], 0)


def _of_experts_with_rows(
    rows_NM: tf.Tensor,
    group_sizes_E: tf.Tensor,
    feed_forward: Callable[[Any, tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """The same result, by a loop over the experts that have rows."""
    experts_e = tf.cast(tf.where(group_sizes_E > 0)[:, 0], tf.int32)
    ends_E = tf.cumsum(group_sizes_E)

    def step(i: tf.Tensor, y_NM: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        expert = experts_e[i]
        end, rows = ends_E[expert], group_sizes_E[expert]
        y_nM = feed_forward(expert, rows_NM[end - rows : end])
        at = tf.range(end - rows, end)
        return i + 1, tf.raw_ops.InplaceUpdate(x=y_NM, i=at, v=y_nM)

    count = tf.shape(experts_e)[0]
    # Not tf.zeros, which may become a constant, into which the loop would write.
    zeros_NM = tf.raw_ops.Empty(shape=tf.shape(rows_NM), dtype=rows_NM.dtype, init=True)
    zeros_NM.set_shape(rows_NM.shape)
    start = (tf.constant(0), zeros_NM)
    return tf.while_loop(lambda i, _: i < count, step, start, parallel_iterations=1)[1]


def _multiply(form: "_Tiles | _Pieces", rows_NM: tf.Tensor, weights_EMH: tf.Tensor) -> tf.Tensor:
    @private.custom_gradient
    def multiply(rows_NM: tf.Tensor, weights_EMH: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def grad(dy_NH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return (
                form.products(dy_NH, weights_EMH, transpose=True),
                form.weights_gradient(rows_NM, dy_NH),
            )

        return form.products(rows_NM, weights_EMH), grad

    return multiply(rows_NM, weights_EMH)


class _Pieces:
    """A product for each group, of as many rows as it has: about `rows`, where that is known."""

    def __init__(self, group_sizes_E: tf.Tensor, rows: int | None, product_for: ProductFor):
        self._sizes_E, self._rows, self._product_for = group_sizes_E, rows, product_for

    def products(
        self, x_NM: tf.Tensor, weights_EMH: tf.Tensor, transpose: bool = False
    ) -> tf.Tensor:
        """[N,H]; transposed from [N,H] to [N,M]."""
        pieces = _split(x_NM, self._sizes_E)
        width = weights_EMH.shape[1 if transpose else 2]
        product = self._transposed if transpose else self._product_for(self._rows, width)
        out = [product(piece, weights_EMH[e]) for e, piece in enumerate(pieces[:-1])]
        out.append(tf.zeros([tf.shape(pieces[-1])[0], width], x_NM.dtype))
        return tf.ensure_shape(tf.concat(out, 0), [x_NM.shape[0], width])

    def weights_gradient(self, x_NM: tf.Tensor, dy_NH: tf.Tensor) -> tf.Tensor:
        """[E,M,H]: each group's rows times their gradients."""
        pieces = zip(*(_split(x, self._sizes_E)[:-1] for x in (x_NM, dy_NH)), strict=True)
        return tf.stack([tf.matmul(x, dy, transpose_a=True) for x, dy in pieces])

    def _transposed(self, x_nH: tf.Tensor, weight_MH: tf.Tensor) -> tf.Tensor:
        """[n,M]. The matrix comes first for few rows: TensorFlow is slow to pack a second one that is transposed."""
        if self._rows is not None and self._rows < _FEW_ROWS:
            return tf.transpose(tf.matmul(weight_MH, x_nH, transpose_b=True))
        return tf.matmul(x_nH, weight_MH, transpose_b=True)


def _split(x: tf.Tensor, sizes_E: tf.Tensor) -> list[tf.Tensor]:
    """The groups, then the rows without an expert."""
    rest = tf.shape(x)[:1] - tf.reduce_sum(sizes_E, keepdims=True)
    return tf.split(x, tf.concat([sizes_E, rest], 0), num=sizes_E.shape[0] + 1)


class _Tiles:
    """A loop over tiles of R rows, each of one group: static shapes, for XLA.

    A group's last tile reaches into the next group's rows, whose own tile is written after it.
    """

    def __init__(self, group_sizes_E: tf.Tensor, rows: int | None, rows_expected: int | None):
        experts = group_sizes_E.shape[0]
        if rows is None:
            raise ValueError("grouped_matmul with XLA needs a static number of rows")
        expected = rows if rows_expected is None else min(rows, rows_expected)
        self._rows = rows
        self._tile = _tile_rows(expected, experts)
        self._scope = f"about_{_tiles_expected(expected, experts, self._tile)}_trips"
        self._sizes_E = group_sizes_E
        self._start_E = tf.cumsum(group_sizes_E, exclusive=True)
        tiles_E = (group_sizes_E + (self._tile - 1)) // self._tile
        self._last_E = tf.cumsum(tiles_E)  # one past the last tile of each
        self._first_E = self._last_E - tiles_E

    def products(
        self, x_NM: tf.Tensor, weights_EMH: tf.Tensor, transpose: bool = False
    ) -> tf.Tensor:
        """[N,H]; transposed from [N,H] to [N,M]."""
        padded = self._padded(x_NM)
        width = weights_EMH.shape[1 if transpose else 2]

        def step(e: tf.Tensor, start: tf.Tensor, _: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
            x_RM = _rows_from(padded, start, self._tile)
            w = tf.gather(weights_EMH, e)
            return _update(out, tf.matmul(x_RM, w, transpose_b=transpose), [start, 0])

        out = self._loop(step, self._zeros([self._rows + self._tile, width], x_NM.dtype))
        # The last group's last tile may have written past it, into rows without an expert.
        total = tf.reduce_sum(self._sizes_E)
        real = tf.range(self._rows)[:, tf.newaxis] < total
        return tf.where(real, out[: self._rows], tf.zeros([], out.dtype))

    def weights_gradient(self, x_NM: tf.Tensor, dy_NH: tf.Tensor) -> tf.Tensor:
        """[E,M,H]: each group's rows times their gradients, summed in float32."""
        x, dy = self._padded(x_NM), self._padded(dy_NH)
        size = self._tile

        def step(e: tf.Tensor, start: tf.Tensor, rows: tf.Tensor, dw: tf.Tensor) -> tf.Tensor:
            x_RM = _rows_from(x, start, size)
            dy_RH = _rows_from(dy, start, size)
            in_group = tf.range(size)[:, tf.newaxis] < rows
            x_RM = tf.where(in_group, x_RM, tf.zeros([], x_RM.dtype))
            dy_RH = tf.where(in_group, dy_RH, tf.zeros([], dy_RH.dtype))
            more = tf.cast(tf.matmul(x_RM, dy_RH, transpose_a=True), dw.dtype)
            return _update(dw, (tf.gather(dw, e) + more)[tf.newaxis], [e, 0, 0])

        shape = [self._sizes_E.shape[0], x.shape[1], dy.shape[1]]
        return tf.cast(self._loop(step, self._zeros(shape, tf.float32)), x_NM.dtype)

    def _loop(self, step: Callable, init: tf.Tensor) -> tf.Tensor:
        """`step(expert, first row, rows of the group from there on, state)` over all tiles."""

        def body(i: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            e = tf.reduce_sum(tf.cast(self._last_E <= i, tf.int32))
            done = (i - tf.gather(self._first_E, e)) * self._tile
            start = tf.gather(self._start_E, e) + done
            return i + 1, step(e, start, tf.gather(self._sizes_E, e) - done, state)

        tiles = self._last_E[-1]
        # Zero by a run-time value: in a manual region the TPU and GPU compilers' partitioners end the process where a
        # counter that starts at a constant, a full tensor to them, goes on as a local one.
        first = tf.minimum(tiles, 0)
        with tf.name_scope(self._scope):
            return tf.while_loop(
                lambda i, _: i < tiles, body, (first, init), parallel_iterations=1
            )[1]

    def _zeros(self, shape: list[int], dtype: tf.DType) -> tf.Tensor:
        """Zeros that depend on a run-time value, so that lowering a program makes no constant of this size."""
        zero = tf.minimum(tf.reduce_sum(self._sizes_E), 0)
        return tf.broadcast_to(tf.cast(zero, dtype), shape)

    def _padded(self, x_NM: tf.Tensor) -> tf.Tensor:
        """Appends R rows of zeros, so that a tile can start at any row."""
        return tf.pad(x_NM, [[0, self._tile], [0, 0]])


def _tile_rows(rows: int, experts: int) -> int:
    """R: the power of two at a group's mean size, 2 at least and 256 at most.

    So at most about twice the rows are multiplied. XLA:CPU multiplies a single row by a matrix six times as slowly
    as two.
    """
    mean = max(rows // experts, 2)
    return min(1 << (mean.bit_length() - 1), _MOST_ROWS)


def _tiles_expected(rows: int, experts: int, tile: int) -> int:
    """The loop's expected length, which the data decide: half a tile more for each group."""
    groups = min(rows, experts)
    return max(groups, math.ceil(rows / tile + groups * (1 - 1 / tile) / 2))


def _rows_from(x: tf.Tensor, start: tf.Tensor, size: int) -> tf.Tensor:
    """Rows start to start + size.

    Not tf.slice: for its sake tf.function(jit_compile=True) takes what `start` is computed from, the
    group sizes, for constants, and compiles again for other ones.
    """
    return gen_xla_ops.xla_dynamic_slice(x, tf.stack([start, 0]), [size, x.shape[1]])


def _update(x: tf.Tensor, part: tf.Tensor, begin: list) -> tf.Tensor:
    """x with `part` written at `begin`; in place where XLA can."""
    return gen_xla_ops.xla_dynamic_update_slice(x, part, tf.stack(begin))
