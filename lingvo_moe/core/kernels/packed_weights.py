"""Pre-packed weights: matrices in blocks of a few columns each, the order in which TensorFlow's kernels read fastest.

A step of a search multiplies a few rows by every weight of the model, so its cost is that of reading the weights. A
product with a plain matrix of many columns first copies pieces of the matrix into a buffer. Blocks of columns that lie
in memory one after another need no copy. With many rows both are equally fast. How many columns are best for a few rows
depends on the processor's registers: blocks are those for the processor that packs, and any other can read them.

A batch of one to three rows takes other kernels and rounds differently, so the search has at least four; but one where
all products are of 8 bits.

Letters: R row, M and N the dimensions of a weight, P block, W column of a block; N head and K key dimension, too.
"""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lingvo_moe.core import processor
from lingvo_moe.core.kernels.eight_bit import EightBit
from lingvo_moe.core.kernels.weights import Heads, Matrix
from lingvo_moe.core.tensors import dim

WIDTH = 64  # of W the multiple for all processors
WEIGHTS = ("float32", "int8")
_MORE = (0, 3, 2, 1, 0, 0)  # rows, by those of a batch that are left over by six


class FloatBlocks(Matrix):
    """A weight [M,N] in blocks [P,M,W] of the type of the activations; a leaf of packed weights.

    Attributes:
        blocks_PMW: the columns, in order; the last block is filled up with zeros.
        columns: N; None: all columns of the blocks.
    """

    def __init__(self, blocks_PMW: Any, columns: int | None):
        self.blocks_PMW, self.columns = blocks_PMW, columns

    @classmethod
    def Of(cls, w_MN: tf.Tensor, head_size: int = 0) -> "FloatBlocks":
        """Packs a weight [M,N]. If N is unknown while tracing, it must be a multiple of WIDTH.

        With a head size K, which must divide N, the blocks divide each head's columns.
        """
        rows, columns = w_MN.shape
        width = head_size if head_size % _block_width() else _block_width()
        size = tf.shape(w_MN)[1] if columns is None else columns
        blocks = -(-size // width)
        w_MN = tf.pad(w_MN, [[0, 0], [0, blocks * width - size]])
        return cls(tf.transpose(tf.reshape(w_MN, [rows, blocks, width]), [1, 0, 2]), columns)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (self.blocks_PMW,)

    def With(self, blocks_PMW: Any) -> "FloatBlocks":
        return FloatBlocks(blocks_PMW, self.columns)

    def _ByBlock(self, x_RM: tf.Tensor) -> tf.Tensor:
        """[P,R,W], and up to three rows more, zeros; see `_even_rows`."""
        return tf.matmul(tf.expand_dims(_even_rows(x_RM), 0), self.blocks_PMW)

    def HeadsProduct(self, x_RM: tf.Tensor, heads: int) -> tf.Tensor:
        y_PRW = self._ByBlock(x_RM)[:, : dim(x_RM, 0)]
        blocks, _, width = self.blocks_PMW.shape
        if blocks == heads:
            return y_PRW
        y_NPRW = tf.reshape(y_PRW, [heads, blocks // heads, -1, width])
        return tf.reshape(tf.transpose(y_NPRW, [0, 2, 1, 3]), [heads, -1, blocks // heads * width])

    def Product(self, x_RM: tf.Tensor) -> tf.Tensor:
        blocks, _, width = self.blocks_PMW.shape
        blocks = tf.shape(self.blocks_PMW)[0] if blocks is None else blocks
        y_RPW = tf.transpose(self._ByBlock(x_RM), [1, 0, 2])[: dim(x_RM, 0)]
        y_RN = tf.reshape(y_RPW, [-1, blocks * width])
        return y_RN if self.columns in (None, blocks * width) else y_RN[:, : self.columns]


@dataclass(frozen=True)
class PackAs:
    """A `Packing`.

    Attributes:
        kind: one of WEIGHTS. For int8 a weight must have a value: an array or an eager tensor.
    """

    kind: str = "float32"

    def Matrix(self, w_MN: tf.Tensor) -> Matrix:
        """Packs a weight [M,N] in the type of the activations."""
        return EightBit.Of(w_MN) if self.kind == "int8" else FloatBlocks.Of(w_MN)

    def Heads(self, *weights_MNK: tf.Tensor) -> Heads:
        """Packs projections [M,N,K] of one input, in the type of the activations."""
        w_MNK = tf.concat(weights_MNK, 1)
        dim, heads, size = w_MNK.shape
        w_MN = tf.reshape(w_MNK, [dim, heads * size])
        packed = EightBit.Of(w_MN) if self.kind == "int8" else FloatBlocks.Of(w_MN, size)
        return Heads(packed, tuple(w.shape[1] for w in weights_MNK))


def _even_rows(x_RM: tf.Tensor) -> tf.Tensor:
    """x [R,M] with as many rows of zeros more as a product needs whose rows are to round the same in every batch.

    oneDNN takes six rows at a time; without AVX-512 it adds up one, two or three rows that are left over in another
    order.
    """
    if processor.has_avx512():
        return x_RM
    rows = dim(x_RM, 0)
    if isinstance(rows, int):
        return tf.pad(x_RM, [[0, _MORE[rows % 6]], [0, 0]]) if _MORE[rows % 6] else x_RM
    return tf.pad(x_RM, tf.constant([[[0, more], [0, 0]] for more in _MORE])[rows % 6])


def _block_width() -> int:
    """W for this machine's processor: how many columns its products of a few rows compute at a time."""
    return WIDTH if processor.has_avx512() else 16
