"""Kernels: the operations that XLA and TensorFlow's own kernels want written differently.

XLA fuses elementwise operations and chooses layouts; TensorFlow's executor runs each operation as written, in a pass
over memory of its own. `xla.py` and `tensorflow.py` implement the same functions, `Kernels`, with the same values and
gradients up to rounding and, in `token_losses`, ties. `tpu.py` is XLA's with the kernels that JAX has for TPUs. Layers
and optimizers state the mathematics and call `kernels.current()`; engines choose with `kernels.using(...)`. XLA's are
the default.

Letters: B batch, T query, S key, M model, H hidden, N head, A head of keys and values, K key dimension, V vocabulary,
E expert, G group, C capacity slot, R row, L layer; of searches: J hypothesis, L step.
"""

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf

from lingvo_moe.core.kernels import xla
from lingvo_moe.core.kernels.scores import Seen
from lingvo_moe.core.kernels.weights import Weight
from lingvo_moe.core.kernels.xla import (
    Activation,
    AdafactorRecipe,
    CacheShape,
    Delta,
    DenseDelta as DenseDelta,
    Drop,
    Keep,
    Shard,
)
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding.mesh import holding


class Kernels(Protocol):
    """The functions of one set of kernels; a module of them is one.

    Arguments named `shard` annotate an activation with its einsum letters (`BaseLayer.Shard`); kernels for one device
    may leave them alone. Arguments named `drop` apply dropout; None applies none. TensorFlow's kernels also take packed
    weights (`weights.py`) where an argument is a `Weight`.

    Queries, keys and values have the layout that the products over positions need: XLA's einsums take [B,T,N,K] and let
    the compiler choose; TensorFlow's products need heads and rows first, and two more transpositions of each would cost
    what one projection does. K is the last dimension of both.

    Attributes:
        MEMORY: the letters of keys and values, e.g. 'BSNK'; N stands for A where there are fewer.
        CACHE: those of a cache, in which L is the step.
    """

    MEMORY: str
    CACHE: str

    def product(self, x: tf.Tensor, w_MH: Weight) -> tf.Tensor:
        """x [B,T,M] times a matrix: [B,T,H]."""

    def project_heads(
        self,
        query: tf.Tensor | None,
        source: tf.Tensor | None,
        weights: NestedMap,
        scale: float,
        shard: Shard,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Queries, times `scale`, keys and values of each head, in the layout of the class's `MEMORY`.

        Args:
            query: [B,T,M]; or None, for None in place of the queries.
            source: [B,S,M]; the same object as `query` in self-attention, which may then take one product; or None,
                for None in place of keys and values.
            weights: q [M,N,K], k and v [M,A,K]; heads of keys and values serve N / A heads of queries each. Or packed,
                as `MultiHeadAttention.PackWeights` gives them, those of queries times `scale`.
        """

    def per_head(self, x_BTK: tf.Tensor) -> tf.Tensor:
        """Adds a dimension of size 1 where these kernels' queries, keys and values have their heads, so that a tensor
        of positions is the same for all heads."""

    def in_layout(self, x_BTNK: tf.Tensor) -> tf.Tensor:
        """Queries, keys or values [B,T,N,K] in the layout of the class's `MEMORY`."""

    def out_of_layout(self, x: tf.Tensor) -> tf.Tensor:
        """Queries, keys or values of that layout as [B,T,N,K]."""

    def attend(
        self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen, drop: Drop | None = None
    ) -> tf.Tensor:
        """softmax(q k^T + bias) v over the keys that are seen: [B,T,N,K].

        The softmax is of float32, and its result of v's type. `drop` takes the probabilities, [B,N,T,S]. The kernels
        decide whether all scores are made at once, by blocks, or inside one fused operation.
        """

    def project_back(self, context_BTNK: tf.Tensor, o_NKM: Weight) -> tf.Tensor:
        """The heads' results, projected to the model and summed over heads: [B,T,M]."""

    def empty_cache(self, shape: CacheShape) -> tf.Tensor:
        """Zeros for the keys, or the values, of a search, of the letters `CACHE`."""

    def write_cache(self, cache: tf.Tensor, new: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
        """The cache with the keys or values of step `time`, an int32 scalar, of J positions in the layout of `MEMORY`;
        or, with J = 1, of the steps `time`, int32 [P], of P positions. The old cache must not be used again: its memory
        may be overwritten."""

    def seen_positions(
        self, query_at: tf.Tensor | None, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor | None, tf.Tensor]:
        """The positions of queries and of keys in the mask of `attend_cache`, at the step or steps `time`."""

    def attend_cache(self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen) -> tf.Tensor:
        """`attend` for J queries, or P of one hypothesis, and the keys and values of two caches. In the mask,
        [B, J or P, L J], key t J + j is hypothesis j at step t."""

    def experts_feed_forward(
        self,
        x_EGCM: tf.Tensor,
        weights: NestedMap,
        activation: Activation,
        drop: Drop | None,
        shard: Shard,
        keep_hidden: Keep | None = None,
    ) -> tf.Tensor:
        """Each expert's drop(f(x wi)) wo for its slots: [E,G,C,M].

        Args:
            weights: wo [E,H,M] and those that the activation names, [E,M,H], in the type of the slots.
            keep_hidden: marks the first products [E,G,C,H], which a loop over layers then keeps (core/tensors.py).
        """

    def grouped_matmul(
        self,
        rows_RM: tf.Tensor,
        weights_EMH: tf.Tensor,
        group_sizes_E: tf.Tensor,
        rows_expected: int | None,
    ) -> tf.Tensor:
        """Each row times the matrix of its group, [R,H]: see `grouped_matmul.py`."""

    def sort_rows(
        self, group_N: tf.Tensor, groups: int, fewest: int = 1
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Sorts rows by their groups, those of a group in their order, those of group `groups`, which is none, last.

        Args:
            fewest: the places that a group with rows has at least. XLA, which multiplies no packed weights, takes 1.

        Returns:
            int32 [N], the place of each row; int32 [R], the row in each place, -1 where there is none, or one without a
            group; int32 [groups], the places of each group, of which the last ones may have no row.
        """

    def normalize(
        self, x: tf.Tensor, scale_M: tf.Tensor, bias_M: tf.Tensor | None, epsilon: float
    ) -> tf.Tensor:
        """Layer normalization of float32 [...,M] over M, times the scale plus the bias: float32. Without a bias RMS
        normalization: the mean stays as it is, and the mean square is divided by."""

    def logits(self, x: tf.Tensor, table_VM: Weight, shard: Shard) -> tf.Tensor:
        """x [B,T,M] times each row of the table: float32 [B,T,V]."""

    def cross_entropy(
        self, logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float
    ) -> tf.Tensor:
        """The `xent` of `token_losses` without weights: float32 logits [...,V], int32 labels [...] to float32 [...]."""

    def token_losses(
        self,
        x: tf.Tensor,
        table_VM: tf.Tensor,
        labels: tf.Tensor,
        weights: tf.Tensor,
        label_smoothing: float,
        shard: Shard,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Computes the losses of the logits of x [B,T,M].

        Args:
            labels: int32 [B,T].
            weights: [B,T], 0 at padding.
            label_smoothing: the share e of the target that is uniform over V.

        Returns:
            (xent, nll, correct), float32 [B,T], all times the weights. With p = softmax(logits):
            xent = -(1 - e) log p[label] - e/V sum_v log p[v]; nll, the same with e = 0; correct, 1 where the label has
            the largest logit. Where several ids have it, XLA's kernels count the lowest id alone, TensorFlow's each
            of them: the lowest would take another pass over the logits. The gradient flows through xent alone.
        """

    def dropout(
        self, x: tf.Tensor, rate: float, seed: tf.Tensor, rows: tf.Tensor | None
    ) -> tf.Tensor:
        """See `kernels.dropout`; here the rate lies between 0 and 1 and there is a seed."""

    def sum_of_squares(self, x: tf.Tensor) -> tf.Tensor:
        """A float32 scalar, of float32 x."""

    def one_pass(self, fn: Callable[..., tuple], *args: tf.Tensor) -> tuple:
        """fn(*args) of elementwise operations on tensors of one shape and scalars, without tensors in between."""

    def adafactor(
        self, weight: tf.Tensor, grad: tf.Tensor, slots: NestedMap, recipe: AdafactorRecipe
    ) -> tuple[Delta, NestedMap]:
        """Adafactor's update of one variable, as `optimizers/adafactor.py` describes it.

        Args:
            weight, grad: float32, of one shape.
            slots: `row` and `col` where `recipe.dims` are factored, else `full`.

        Returns:
            What to subtract from the weight, and the new slots.
        """

    def slices(self, stacks: Sequence[tf.Tensor], num: int) -> list[list[tf.Tensor]]:
        """Returns the slices of all stacks [L,...] that belong to each of `num` layers."""

    def select(
        self, condition: tf.Tensor, new: list[tf.Tensor], old: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """`new` where the bool scalar is true, else `old`."""

    def batch_independent(self, fn: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
        """fn(x) for x [...,1] and an elementwise function such as tf.math.log; how an element is rounded does not
        depend on how many others there are."""


_current: contextvars.ContextVar[Kernels] = contextvars.ContextVar("kernels", default=xla)


def using(kernels: Kernels) -> contextlib.AbstractContextManager[Kernels]:
    """Code that is traced inside calls these kernels. Engines enter it."""
    return holding(_current, kernels)


def current() -> Kernels:
    """The kernels in use; XLA's unless an engine chose others."""
    return _current.get()


def dropout(
    x: tf.Tensor, rate: float, seed: tf.Tensor | None, rows: tf.Tensor | None = None
) -> tf.Tensor:
    """Zeroes each element with probability `rate` and scales the others by 1/(1-rate).

    Args:
        x: of a static shape.
        rate: in [0, 1).
        seed: int32 [2]; None, which means inference, returns `x` itself.
        rows: int32, the shape of x without its last dimension. Each row then draws what row `rows[...]` of a
            matrix would draw, wherever it lies.

    Raises:
        ValueError: a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout rate must lie in [0, 1), got {rate}")
    if seed is None or rate == 0:
        return x
    return current().dropout(x, rate, seed, rows)
