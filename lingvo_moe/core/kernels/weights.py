"""Weights that kernels take in the place of tensors: what packed weights are, whatever their kind.

They are leaves of theta. A layer says in `PackWeights` which of its weights a product reads, and TensorFlow's kernels
(`tensorflow.py`) take either. `packed_weights.py` has the kinds.

Letters: R row, M and N the dimensions of a weight, P block, W column of a block. Of attention: B batch, T query, N
head, K key dimension.
"""

import abc
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from lingvo_moe.core.tensors import open_shape

FEWEST_ROWS = 4  # of a product of floats: fewer take longer; a single one rounds differently


class Matrix(abc.ABC):
    """A packed weight [M,N].

    A row's result is the same in every batch of at least FEWEST_ROWS; a smaller one may round differently, but where
    `rows_alike`.
    """

    @property
    @abc.abstractmethod
    def rows_alike(self) -> bool:
        """Whether a row's result is the same in every batch, of a single row, too."""

    @property
    @abc.abstractmethod
    def tensors(self) -> tuple[Any, ...]:
        """The tensors that a module must keep as variables, in the order of the arguments of `With`."""

    @abc.abstractmethod
    def With(self, *tensors: Any) -> "Matrix":
        """A copy over other tensors of the same shapes, e.g. the values of variables that hold `tensors`."""

    @abc.abstractmethod
    def Product(self, x_RM: tf.Tensor) -> tf.Tensor:
        """Multiplies rows [R,M] by the weight: [R,N], in the type of the rows."""

    @abc.abstractmethod
    def HeadsProduct(self, x_RM: tf.Tensor, heads: int) -> tf.Tensor:
        """Multiplies rows [R,M] by the columns [M,K] of each of `heads` heads: [heads,R,K], where N = heads K."""


class Heads:
    """Projections [M,N,K] of one input, in one packed weight; a leaf like the others.

    Attributes:
        packed: the heads' weights [M,K], one after another.
        numbers: N of each projection.
    """

    def __init__(self, packed: Matrix, numbers: tuple[int, ...]):
        self.packed, self.numbers = packed, numbers

    @property
    def tensors(self) -> tuple[Any, ...]:
        """See `Matrix`."""
        return self.packed.tensors

    @property
    def rows_alike(self) -> bool:
        """See `Matrix`."""
        return self.packed.rows_alike

    def With(self, *tensors: Any) -> "Heads":
        """See `Matrix`."""
        return Heads(self.packed.With(*tensors), self.numbers)

    def Project(self, x_BTM: tf.Tensor) -> list[tf.Tensor]:
        """Multiplies x [B,T,M] by each projection: a list of [N,B,T,K]."""
        batch, time, dim = open_shape(x_BTM)
        heads = sum(self.numbers)
        y_NRK = self.packed.HeadsProduct(tf.reshape(x_BTM, [-1, dim]), heads)
        y_NBTK = tf.reshape(y_NRK, [heads, batch, time, y_NRK.shape[-1]])
        return tf.split(y_NBTK, self.numbers, 0) if len(self.numbers) > 1 else [y_NBTK]


class StackedMatrices:
    """Packed weights of experts in one leaf: `self[e]` is that of an expert which is chosen while a graph runs.

    Attributes:
        tensors: those of all experts, [E,...].
    """

    def __init__(self, expert: Matrix, tensors: tuple[Any, ...]):
        """The `expert` is any of them: what they have beside tensors is the same."""
        self._expert, self.tensors = expert, tensors

    @classmethod
    def Of(cls, matrices: Sequence[Matrix]) -> "StackedMatrices":
        """Joins the experts' weights, in their order."""
        return cls(matrices[0], tuple(map(tf.stack, zip(*(x.tensors for x in matrices)))))

    def __getitem__(self, expert: tf.Tensor) -> Matrix:
        return self._expert.With(*(x[expert] for x in self.tensors))

    @property
    def rows_alike(self) -> bool:
        """See `Matrix`."""
        return self._expert.With(*self.tensors).rows_alike

    def With(self, *tensors: Any) -> "StackedMatrices":
        """See `Matrix`."""
        return StackedMatrices(self._expert.With(*(None for _ in tensors)), tensors)


Packed = Matrix | Heads | StackedMatrices
Weight = tf.Tensor | Matrix


class Packing(Protocol):
    """Packs weights in one format: in blocks of the type of the activations, or of 8-bit numbers."""

    def Matrix(self, w_MN: tf.Tensor) -> "Matrix":
        """Packs a weight [M,N] in the type of the activations."""

    def Heads(self, *weights_MNK: tf.Tensor) -> Heads:
        """Packs projections [M,N,K] of one input, in the type of the activations."""

    def Experts(self, w_EMN: tf.Tensor) -> StackedMatrices | list[Packed] | tf.Tensor:
        """Packs the experts' weights, together, or where that cannot be each for itself, or leaves them as they are."""

    def Unrounded(self, w_MN: tf.Tensor) -> Packed:
        """Packs a weight [M,N] of few columns in its own type, whose results a choice depends on."""
