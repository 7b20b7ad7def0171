"""Positions of tokens: added to their embeddings, or given to the queries and keys of attention.

Letters: B batch, T time, M model, K key dimension.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError
from lingvo_moe.core.config.hyperparams import Params as HyperParams
from lingvo_moe.core.nested_map import NestedMap


class Positions(BaseLayer):
    """No positions: a causal mask alone tells them apart (Haviv et al. 2022, "Transformer Language Models without
    Positional Encodings Still Learn Positional Information"). Other kinds derive from it, and have no weights."""

    PART: ClassVar[str] = "embedding"
    NAMES_ITS_PARTS: ClassVar[bool] = True
    IN_ATTENTION: ClassVar[bool] = False  # whether queries and keys take them

    @classmethod
    def SetModelDim(cls, params: HyperParams, model_dim: int) -> None:
        """Sets in the Params of positions that need it the width of the embeddings that they are added to."""

    def Add(self, x: tf.Tensor, segment_pos: tf.Tensor) -> tf.Tensor:
        """Adds to embeddings x [B, T, M] the positions of their tokens, int32 [B, T], each counted in its segment."""
        del segment_pos
        return x

    def CheckHeads(self, size: int) -> None:
        """Raises ValueError if queries and keys of K = `size` numbers cannot take them."""
        del size

    def Give(self, heads: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Gives queries or keys, K last, their positions, int32 [B, T], or [1, 1] for all of them.

        The layout of `heads` is that of the kernels in use: see `Kernels.per_head`.
        """
        del positions
        return heads


class PositionalEmbedding(Positions):
    """Sinusoids of geometrically spaced wavelengths: sines, then cosines, along M.

    Computed where it is used, from the position of each token in its own segment; there is no
    table.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M, even.", check=checks.SIZE)
        p.Define(
            "min_timescale",
            1.0,
            "The shortest wavelength over 2*pi, in tokens.",
            check=checks.POSITIVE,
        )
        p.Define(
            "max_timescale",
            10000.0,
            "The longest wavelength over 2*pi, in tokens.",
            check=checks.POSITIVE,
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        if self.p.model_dim % 2:
            raise ParamError(f"{self.path}.model_dim", str(self.p.model_dim), "must be even")

    @classmethod
    def SetModelDim(cls, params: HyperParams, model_dim: int) -> None:
        params.model_dim = model_dim

    def FProp(self, theta: NestedMap, segment_pos: tf.Tensor) -> tf.Tensor:
        """Embeds segment_pos, int32 [B, T]: [B, T, M] in the activations' type."""
        p = self.p
        num = p.model_dim // 2
        step = math.log(p.max_timescale / p.min_timescale) / max(1, num - 1)
        rates = tf.constant([math.exp(-i * step) / p.min_timescale for i in range(num)])
        angles = tf.cast(segment_pos, tf.float32)[..., tf.newaxis] * rates
        waves = tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)
        return self.Cast(waves)

    def Add(self, x: tf.Tensor, segment_pos: tf.Tensor) -> tf.Tensor:
        """See Positions."""
        return x + self.FProp(NestedMap(), segment_pos)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """No matrix multiplication."""
        return NestedMap(flops=0, out_shapes=((*input_shapes[0], params.model_dim),))


class Rotary(Positions):
    """Turns queries and keys by angles that grow with their positions, so that their products depend on the distance
    alone (Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding").

    Numbers i and i + K/2 of a head are turned together, by position * max_timescale^(-2i/K), in float32.
    """

    IN_ATTENTION: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "max_timescale",
            10000.0,
            "The base of the angles (theta elsewhere): near the longest wavelength over 2*pi, in tokens.",
            check=checks.POSITIVE,
        )
        return p

    def CheckHeads(self, size: int) -> None:
        """See Positions."""
        if size % 2:
            raise ValueError(
                f"rotary positions turn the numbers of a head in pairs, and a head has {size}; set task.key_dim, or "
                "dim_per_head of the layer, to an even number"
            )

    def Give(self, heads: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """See Positions."""
        size = heads.shape[-1]
        rates = tf.constant([self.p.max_timescale ** (-2 * i / size) for i in range(size // 2)])
        angles = tf.cast(positions, tf.float32)[..., tf.newaxis] * rates
        per_head = kernels.current().per_head
        cos, sin = per_head(tf.cos(angles)), per_head(tf.sin(angles))
        a, b = tf.split(tf.cast(heads, tf.float32), 2, axis=-1)
        return tf.cast(tf.concat([a * cos - b * sin, b * cos + a * sin], -1), heads.dtype)


POSITIONS: Mapping[str, type[Positions]] = {
    "none": Positions,
    "rotary": Rotary,
    "sinusoidal": PositionalEmbedding,
}
