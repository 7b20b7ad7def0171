"""Pre-packed weights: matrices in blocks of a few columns each, the order in which TensorFlow's kernels read fastest.

A step of a search multiplies a few rows by every weight of the model, so its cost is that of reading the weights. A
product with a plain matrix of many columns first copies pieces of the matrix into a buffer. Blocks of columns that lie
in memory one after another need no copy. With many rows both are equally fast.

A row's result is the same in every batch of two or more; a batch of one takes another kernel and rounds differently.
Callers therefore pass at least two rows. Two or three rows take longer than four, so the search has at least four.

Letters: R row, M and N the dimensions of a weight, P block, W column of a block.
"""

from typing import Any

import tensorflow as tf

from lingvo_moe.tasks.mt.decoding.eight_bit import EightBit

WIDTH = 64  # the default of W
FEWEST_ROWS = 4  # fewer take longer; a single one rounds differently
WEIGHTS = ("float32", "int8")


class FloatBlocks:
    """A weight [M,N] in blocks [P,M,W] of the type of the activations; a leaf of packed weights.

    Attributes:
        blocks_PMW: the columns, in order; the last block is filled up with zeros.
        columns: N; None: all columns of the blocks.
    """

    def __init__(self, blocks_PMW: Any, columns: int | None):
        self.blocks_PMW, self.columns = blocks_PMW, columns

    @classmethod
    def Of(cls, w_MN: tf.Tensor, width: int = WIDTH) -> "FloatBlocks":
        """Packs a weight [M,N]. If N is unknown while tracing, it must be a multiple of `width`."""
        rows, columns = w_MN.shape
        size = tf.shape(w_MN)[1] if columns is None else columns
        blocks = -(-size // width)
        w_MN = tf.pad(w_MN, [[0, 0], [0, blocks * width - size]])
        return cls(tf.transpose(tf.reshape(w_MN, [rows, blocks, width]), [1, 0, 2]), columns)

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensors that a module must keep as variables, in the order of the arguments of `With`."""
        return (self.blocks_PMW,)

    def With(self, blocks_PMW: Any) -> "FloatBlocks":
        """The same weight over another tensor of the same shape, e.g. the value of a variable."""
        return FloatBlocks(blocks_PMW, self.columns)

    def ProductByBlock(self, x_RM: tf.Tensor) -> tf.Tensor:
        """Multiplies rows [R,M] by each block and returns [P,R,W]."""
        return tf.matmul(tf.expand_dims(x_RM, 0), self.blocks_PMW)

    def Product(self, x_RM: tf.Tensor) -> tf.Tensor:
        """Multiplies rows [R,M] by the weight and returns [R,N]."""
        blocks, _, width = self.blocks_PMW.shape
        blocks = tf.shape(self.blocks_PMW)[0] if blocks is None else blocks
        y_RPW = tf.transpose(self.ProductByBlock(x_RM), [1, 0, 2])
        y_RN = tf.reshape(y_RPW, [-1, blocks * width])
        return y_RN if self.columns in (None, blocks * width) else y_RN[:, : self.columns]


Packed = FloatBlocks | EightBit


def pack(w_MN: tf.Tensor, kind: str) -> Packed:
    """Packs a weight [M,N].

    Args:
        w_MN: in the type of the activations. For int8 it must have a value: an array or an eager tensor.
        kind: one of WEIGHTS.
    """
    return EightBit.Of(w_MN, WIDTH) if kind == "int8" else FloatBlocks.Of(w_MN)


def pack_blocks(w_PMW: tf.Tensor, kind: str) -> Packed:
    """Packs a weight that is given as blocks [P,M,W], e.g. one for each head. `kind` as for `pack`."""
    blocks, rows, width = w_PMW.shape
    if kind != "int8":
        return FloatBlocks(w_PMW, blocks * width)
    w_MPW = tf.transpose(w_PMW, [1, 0, 2])
    return EightBit.Of(tf.reshape(w_MPW, [rows, blocks * width]), width)
