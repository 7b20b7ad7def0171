"""Positions of tokens: added to their embeddings, or given to the queries and keys of attention.

Letters: B batch, T time, M model, K key dimension.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
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
        return x

    def CheckHeads(self, size: int) -> None:
        """Raises ValueError if `size` numbers of a head cannot take them."""

    def Give(self, heads: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Gives queries or keys, K last, their positions, int32 [B, T], or [1, 1] for all of them.

        The layout of `heads` is that of the kernels in use: see `Kernels.per_head`.
        """
        return heads

    def ScoreScale(self) -> float:
        """A factor of the products of queries and keys, turned or not."""
        return 1.0


class PositionalEmbedding(Positions):
    """Sinusoids of geometrically spaced wavelengths: sines, then cosines, along M.

    Computed where it is used, from the position of each token in its own segment; there is no
    table.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M, even.", checks.SIZE)
        p.Define(
            "min_timescale", 1.0, "The shortest wavelength over 2*pi, in tokens.", checks.POSITIVE
        )
        p.Define(
            "max_timescale",
            10000.0,
            "The longest wavelength over 2*pi, in tokens.",
            checks.POSITIVE,
        )
        p.Define(
            "offset", 0, "The position of a text's first token, e.g. 2 in fairseq.", checks.COUNT
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
        if p.offset:
            segment_pos += p.offset
        angles = tf.cast(segment_pos, tf.float32)[..., tf.newaxis] * rates
        waves = tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)
        return self.Cast(waves)

    def Add(self, x: tf.Tensor, segment_pos: tf.Tensor) -> tf.Tensor:
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
            checks.POSITIVE,
        )
        return p

    def CheckHeads(self, size: int) -> None:
        if size % 2:
            raise ValueError(
                f"rotary positions turn the numbers of a head in pairs, and a head has {size}; set task.key_dim, or "
                "dim_per_head of the layer (of latent attention its turned_dim), to an even number"
            )

    def Give(self, heads: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        rates = tf.constant(self.Rates(heads.shape[-1]))
        angles = tf.cast(positions, tf.float32)[..., tf.newaxis] * rates
        per_head = kernels.current().per_head
        cos, sin = per_head(tf.cos(angles)), per_head(tf.sin(angles))
        if (amplitude := self.Amplitude()) != 1.0:
            cos, sin = cos * amplitude, sin * amplitude
        a, b = tf.split(tf.cast(heads, tf.float32), 2, axis=-1)
        return tf.cast(tf.concat([a * cos - b * sin, b * cos + a * sin], -1), heads.dtype)

    def Rates(self, size: int) -> list[float]:
        """The angle by which each pair of numbers of a head of so many is turned from a position to the next."""
        return [self.p.max_timescale ** (-2 * i / size) for i in range(size // 2)]

    def Amplitude(self) -> float:
        """A factor of turned queries and keys."""
        return 1.0


class ScaledRotary(Rotary):
    """The base of rotary positions for texts that are longer than those of the first training.

    Attributes:
        TURNS: the parameters that bound how often a pair turns where it is partly slowed, the smaller one first; () for
            none.
    """

    TURNS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("factor", 8.0, "How many times longer texts may be.", checks.POSITIVE)
        p.Define(
            "original_length", 8192, "The tokens of a text in the first training.", checks.SIZE
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        for low, high in itertools.pairwise(self.TURNS):
            least, most = self.p.Get(low), self.p.Get(high)
            if most < least:
                raise ParamError(
                    f"{self.path}.{high}", str(most), f"must be at least {low}={least}"
                )


class Llama3Rotary(ScaledRotary):
    """Llama 3.1's (Grattafiori et al. 2024): long wavelengths are `factor` times longer, short ones stay, and those
    between the two bounds are between the two."""

    TURNS = ("low_turns", "high_turns")

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "low_turns",
            1.0,
            "Pairs that turn less often in the original length are slowed (low_freq_factor elsewhere).",
            checks.POSITIVE,
        )
        p.Define(
            "high_turns",
            4.0,
            "Pairs that turn more often stay (high_freq_factor elsewhere); at least low_turns.",
            checks.POSITIVE,
        )
        return p

    def Rates(self, size: int) -> list[float]:
        p = self.p

        def scaled(rate: float) -> float:
            turns = p.original_length * rate / (2 * math.pi)
            if p.low_turns <= turns <= p.high_turns:
                kept = (turns - p.low_turns) / max(p.high_turns - p.low_turns, 1e-9)
            else:
                kept = float(turns > p.high_turns)
            return kept * rate + (1 - kept) * rate / p.factor

        return [scaled(rate) for rate in super().Rates(size)]


class YarnRotary(ScaledRotary):
    """YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models"): pairs that turn
    seldom are slowed by `factor`, those that turn often stay, and a ramp over the pairs lies between.

    With m(s) = 1 + 0.1 s ln(factor), turned queries and keys are multiplied by m(mscale) / m(mscale_all), and the
    products of whole heads, which may have parts that are not turned, by m(mscale_all)^2.
    """

    TURNS = ("slow_turns", "fast_turns")

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "fast_turns",
            32.0,
            "The ramp begins at the pair that turns so often in the original length (beta_fast elsewhere).",
            checks.POSITIVE,
        )
        p.Define("slow_turns", 1.0, "It ends here (beta_slow elsewhere).", checks.POSITIVE)
        p.Define("whole_pairs", True, "Whether the ramp begins and ends at whole pairs (truncate).")
        p.Define("mscale", 1.0, "See above.", checks.NOT_NEGATIVE)
        p.Define("mscale_all", 0.0, "See above (mscale_all_dim).", checks.NOT_NEGATIVE)
        return p

    def Rates(self, size: int) -> list[float]:
        p = self.p

        def pair(turns: float) -> float:
            of_one = p.original_length / (turns * 2 * math.pi)
            return size * math.log(of_one) / (2 * math.log(p.max_timescale))

        first, last = pair(p.fast_turns), pair(p.slow_turns)
        if p.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        width = (last - first) or 0.001
        slowed = [min(max((i - first) / width, 0.0), 1.0) for i in range(size // 2)]
        rates = zip(super().Rates(size), slowed, strict=True)
        return [rate * (1 - share) + rate / p.factor * share for rate, share in rates]

    def _Scale(self, weight: float) -> float:
        return 1.0 + 0.1 * weight * math.log(max(self.p.factor, 1.0))

    def Amplitude(self) -> float:
        return self._Scale(self.p.mscale) / self._Scale(self.p.mscale_all)

    def ScoreScale(self) -> float:
        return self._Scale(self.p.mscale_all) ** 2


POSITIONS: Mapping[str, type[Positions]] = {
    "llama3": Llama3Rotary,
    "none": Positions,
    "rotary": Rotary,
    "sinusoidal": PositionalEmbedding,
    "yarn": YarnRotary,
}
