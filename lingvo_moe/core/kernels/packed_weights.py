"""Pre-packed weights: matrices in blocks of a few columns each, the order in which TensorFlow's kernels read fastest.

A step of a search multiplies a few rows by every weight of the model, so its cost is that of reading the weights. A
product with a plain matrix of many columns first copies pieces of the matrix into a buffer. Blocks of columns that lie
in memory one after another need no copy. With many rows both are equally fast. How many columns are best for a few rows
depends on the processor's registers: blocks are those for the processor that packs, and any other can read them.

With AVX-512 a batch of one to three rows takes other kernels and rounds differently, so a search has at least four, but
where all products are of 8 bits. Without it, a search that has one row for a line packs weights as `FloatRows`.

Letters: R row, M and N the dimensions of a weight, P block, W column of a block; N head and K key dimension, too.
"""

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from lingvo_moe.core import processor
from lingvo_moe.core.kernels.eight_bit import EightBit
from lingvo_moe.core.kernels.weights import Heads, Matrix, Packed, StackedMatrices
from lingvo_moe.core.kernels.without_avx512 import wider
from lingvo_moe.core.tensors import dim

WIDTH = 64  # of W the multiple for all processors
WEIGHTS = ("float32", "int8")
_MORE = (0, 3, 2, 1, 0, 0)  # rows, by those of a batch that are left over by six
_MOST_OPERATIONS = 256  # a product for each expert of more would be a large graph
_TERMS = 256  # that oneDNN adds up one after the other, for a batch of several rows; for a single row, all


class FloatBlocks(Matrix):
    """A weight [M,N] in blocks [P,M,W] of the type of the activations; a leaf of packed weights.

    Attributes:
        blocks_PMW: the columns, in order; the last block is filled up with zeros, and there may be more of zeros.
        columns: N.
    """

    def __init__(self, blocks_PMW: Any, columns: int | tf.Tensor):
        self.blocks_PMW, self.columns = blocks_PMW, columns

    @classmethod
    def Of(cls, w_MN: tf.Tensor, head_size: int = 0) -> "FloatBlocks":
        """Packs a weight [M,N]; N may be unknown while tracing.

        With a head size K, which must divide N, the blocks divide each head's columns.
        """
        rows, columns = w_MN.shape[0], dim(w_MN, 1)
        width = head_size if head_size % _block_width() else _block_width()
        blocks = -(-columns // width)
        if not isinstance(blocks, int) or blocks > 1:
            blocks += -blocks % _threads()
        w_MN = tf.pad(w_MN, [[0, 0], [0, blocks * width - columns]])
        return cls(tf.transpose(tf.reshape(w_MN, [rows, blocks, width]), [1, 0, 2]), columns)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (self.blocks_PMW,)

    @property
    def rows_alike(self) -> bool:
        return self.blocks_PMW.dtype == tf.float32 and not processor.has_avx512()

    def With(self, blocks_PMW: Any) -> "FloatBlocks":
        return FloatBlocks(blocks_PMW, self.columns)

    def _ByBlock(self, x_RM: tf.Tensor, order: str) -> tf.Tensor:
        """The products of rows with each block, "PRW" or "RPW"."""
        rows = dim(x_RM, 0)
        even_RM = _even_rows(x_RM, rows)
        y = tf.matmul(tf.expand_dims(even_RM, 0), self.blocks_PMW)
        y = y if order == "PRW" else tf.transpose(y, [1, 0, 2])
        if even_RM is x_RM:
            return y
        sizes = [-1 if n is None else n for n in y.shape]
        sizes[order.index("R")] = rows
        return tf.slice(y, [0, 0, 0], sizes)

    def HeadsProduct(self, x_RM: tf.Tensor, heads: int) -> tf.Tensor:
        y_PRW = self._ByBlock(x_RM, "PRW")
        width = self.blocks_PMW.shape[2]
        blocks = self.columns // width
        y_PRW = y_PRW if blocks == y_PRW.shape[0] else y_PRW[:blocks]
        if blocks == heads:
            return y_PRW
        y_NPRW = tf.reshape(y_PRW, [heads, blocks // heads, -1, width])
        return tf.reshape(tf.transpose(y_NPRW, [0, 2, 1, 3]), [heads, -1, blocks // heads * width])

    def Product(self, x_RM: tf.Tensor) -> tf.Tensor:
        blocks, width = dim(self.blocks_PMW, 0), self.blocks_PMW.shape[2]
        y_RN = tf.reshape(self._ByBlock(x_RM, "RPW"), [-1, blocks * width])
        exact = isinstance(blocks, int) and self.columns == blocks * width
        return y_RN if exact else y_RN[:, : self.columns]


class FloatRows(Matrix):
    """A weight [M,N] as it is, which a single row reads from beginning to end; a leaf of packed weights.

    For processors without AVX-512. A batch of four or eight rows is slower than with blocks, by up to a quarter.

    Attributes:
        wide_MW: the weight, and columns of zeros up to a multiple of 16, and more where its rows would lie in the same
            few places of the cache.
        columns: N.
    """

    def __init__(self, wide_MW: Any, columns: int):
        self.wide_MW, self.columns = wide_MW, columns

    @classmethod
    def Of(cls, w_MN: tf.Tensor) -> "FloatRows":
        """Packs a weight [M,N], or those of experts [E,M,N]."""
        columns = w_MN.shape[-1]
        # Of columns that are left over by 16 oneDNN adds up the terms in another order.
        room = [[0, 0]] * (w_MN.shape.rank - 1) + [[0, -columns % 16]]
        return cls(wider(tf.pad(w_MN, room)), columns)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (self.wide_MW,)

    @property
    def rows_alike(self) -> bool:
        return self.wide_MW.dtype == tf.float32

    def With(self, wide_MW: Any) -> "FloatRows":
        return FloatRows(wide_MW, self.columns)

    def HeadsProduct(self, x_RM: tf.Tensor, heads: int) -> tf.Tensor:
        y_RNK = tf.reshape(self.Product(x_RM), [-1, heads, self.columns // heads])
        return tf.transpose(y_RNK, [1, 0, 2])

    def Product(self, x_RM: tf.Tensor) -> tf.Tensor:
        rows = dim(x_RM, 0)

        def several() -> tf.Tensor:
            return tf.matmul(_even_rows(x_RM, rows), self.wide_MW)[:rows]

        def single() -> tf.Tensor:
            return self._OfSingle(x_RM[:1])

        if isinstance(rows, int):
            y_RW = single() if rows == 1 and self._adds_up_in_order else several()
        elif not self._adds_up_in_order:
            y_RW = several()
        else:
            y_RW = tf.cond(tf.equal(rows, 1), single, several)
        return y_RW[:, : self.columns]

    @property
    def _adds_up_in_order(self) -> bool:
        """Whether oneDNN takes the terms of a single row's part one after the other: not in one product of 513 to 1,023
        columns, but in two or more at once."""
        terms, width = self.wide_MW.shape
        parts = _terms(terms)
        return not 512 < width < 1024 or (len(parts) > 1 and len(set(parts)) == 1)

    def _OfSingle(self, x_1M: tf.Tensor) -> tf.Tensor:
        """The product of one row, by parts, whose terms oneDNN adds up in the order of a batch."""
        sizes = _terms(self.wide_MW.shape[0])
        if len(set(sizes)) == 1:
            x_P1m = tf.reshape(x_1M, [len(sizes), 1, sizes[0]])
            w_PmW = tf.reshape(self.wide_MW, [len(sizes), sizes[0], self.wide_MW.shape[1]])
            parts = tf.unstack(tf.matmul(x_P1m, w_PmW))
        else:
            pieces = zip(tf.split(x_1M, sizes, 1), tf.split(self.wide_MW, sizes), strict=True)
            parts = [tf.matmul(x, w) for x, w in pieces]
        return functools.reduce(tf.add, parts)


@dataclass(frozen=True)
class PackAs:
    """A `Packing`.

    Attributes:
        kind: one of WEIGHTS. For int8 a weight must have a value: an array or an eager tensor.
        beam_size: the rows that a search has for a line; float32 is packed so that a line alone is fast.
    """

    kind: str = "float32"
    beam_size: int = 4

    def Matrix(self, w_MN: tf.Tensor) -> Matrix:
        """Packs a weight [M,N] in the type of the activations."""
        return self._Packed(w_MN, 0)

    def Heads(self, *weights_MNK: tf.Tensor) -> Heads:
        """Packs projections [M,N,K] of one input, in the type of the activations."""
        w_MNK = tf.concat(weights_MNK, 1)
        dim, heads, size = w_MNK.shape
        packed = self._Packed(tf.reshape(w_MNK, [dim, heads * size]), size)
        return Heads(packed, tuple(w.shape[1] for w in weights_MNK))

    def Experts(self, w_EMN: tf.Tensor) -> StackedMatrices | list[Any] | tf.Tensor:
        """Packs the experts' weights [E,M,N], in the type of the activations; for one row, as many of them have.

        Those of 8 bits are packed again by the kernel where a graph first multiplies them, so each has an operation.
        """
        if self.kind != "int8" and not processor.has_avx512():
            rows = FloatRows.Of(w_EMN)
            return StackedMatrices(rows, rows.tensors)
        if self.kind == "int8" and w_EMN.shape[0] > _MOST_OPERATIONS:
            return w_EMN
        matrices = [self.Matrix(w_MN) for w_MN in tf.unstack(w_EMN)]
        return matrices if self.kind == "int8" else StackedMatrices.Of(matrices)

    def Unrounded(self, w_MN: tf.Tensor) -> Packed:
        """Packs a weight [M,N] of few columns in its own type."""
        return replace(self, kind="float32").Matrix(w_MN)

    def _Packed(self, w_MN: tf.Tensor, head_size: int) -> FloatBlocks | FloatRows | EightBit:
        if self.kind == "int8":
            return EightBit.Of(w_MN)
        if self.beam_size == 1 and not processor.has_avx512():
            return FloatRows.Of(w_MN)
        return FloatBlocks.Of(w_MN, head_size)


def _terms(of_all: int) -> list[int]:
    """The numbers of terms of a sum that oneDNN adds up at a time, without AVX-512."""
    sizes = [_TERMS] * max(0, of_all // _TERMS - 1)
    rest = of_all - sum(sizes)
    return [*sizes, rest] if rest <= _TERMS else [*sizes, (rest + 1) // 2, rest // 2]


def _even_rows(x_RM: tf.Tensor, rows: int | tf.Tensor) -> tf.Tensor:
    """x [R,M] with as many rows of zeros more as a product needs whose rows are to round the same in every batch.

    oneDNN takes six rows at a time; without AVX-512 it adds up one, two or three rows that are left over in another
    order.
    """
    if processor.has_avx512():
        return x_RM
    if isinstance(rows, int):
        return tf.pad(x_RM, [[0, _MORE[rows % 6]], [0, 0]]) if _MORE[rows % 6] else x_RM
    return tf.pad(x_RM, tf.gather([[[0, more], [0, 0]] for more in _MORE], rows % 6))


def _threads() -> int:
    """The number of which that of the blocks must be a multiple.

    Without AVX-512, oneDNN gives each thread an equal part of a product's numbers. Where a block's rows fell to two
    threads, each would add them up as a batch of so few.
    """
    if processor.has_avx512():
        return 1
    chosen = tf.config.threading.get_intra_op_parallelism_threads()
    chosen = chosen or int(os.environ.get("TF_NUM_INTRAOP_THREADS") or 0)
    return chosen or len(os.sched_getaffinity(0))


def _block_width() -> int:
    """W for this machine's processor: how many columns its products of a few rows compute at a time."""
    return WIDTH if processor.has_avx512() else 16
