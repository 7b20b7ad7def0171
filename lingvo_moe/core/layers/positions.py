"""Positions of tokens: added to their embeddings, given to the queries and keys of attention, or added to its scores.

Letters: B batch, T time or query, S key, M model, N head, K key dimension, W bucket of distances.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap


class Positions(BaseLayer):
    """No positions: a causal mask alone tells them apart (Haviv et al. 2022, "Transformer Language Models without
    Positional Encodings Still Learn Positional Information"). Other kinds derive from it."""

    PART: ClassVar[str] = "embedding"
    NAMES_ITS_PARTS: ClassVar[bool] = True
    IN_ATTENTION: ClassVar[bool] = False  # whether attention takes them, not embeddings

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
    alone (Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2.2).

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
                share = (turns - p.low_turns) / max(p.high_turns - p.low_turns, 1e-9)
            else:
                share = float(turns > p.high_turns)
            return share * rate + (1 - share) * rate / p.factor

        return [scaled(rate) for rate in super().Rates(size)]


class YarnRotary(ScaledRotary):
    """YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.2 and
    3.4): pairs that turn seldom are slowed by `factor`, those that turn often stay, and a ramp over the pairs lies
    between. The ramp is linear in the number of the pair, as in the code of published models; that of the paper's
    equation 18 is linear in how often a pair turns.

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


class ScoreBias(Positions):
    """Positions as numbers that are added to the scores of self-attention, by head, query and key."""

    PART: ClassVar[str] = "attention"
    NAMES_ITS_PARTS: ClassVar[bool] = False
    IN_ATTENTION: ClassVar[bool] = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("num_heads", 1, "N.", checks.SIZE, parent_sets="attention sets it to its heads")
        return p

    @classmethod
    def OfStack(cls, params: InstantiableParams) -> InstantiableParams | None:
        """Params of a layer with the weights that all layers of a stack share; None: they share none."""
        return None

    @scoped
    def Bias(self, theta: NestedMap, query_at: tf.Tensor, key_at: tf.Tensor) -> tf.Tensor:
        """The numbers, float32 [B, N, T, S], in which B, N and T may be 1 for all rows, heads or queries.

        Args:
            theta: the weights, if there are any: its own, or those that the layers of a stack share.
            query_at: int32 [B, T], the positions of queries in their segments; in a step of a search [1, 1], or [1, P].
            key_at: int32 [B, S]; in a step of a search [1, S].
        """
        raise NotImplementedError(f"{type(self).__name__}.Bias")


class Alibi(ScoreBias):
    """Subtracts from each score a slope of its head times the distance of query and key (Press et al. 2021, "Train
    Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation", section 3).

    With N a power of two the slopes are 2^(-8/N), 2^(-16/N), ... 2^-8. With any other N they are those of the next
    smaller power of two, and then every second one of the next larger power, as in the authors' code. In an encoder,
    the distance of later keys counts as that of earlier ones.
    """

    def Slopes(self) -> list[float]:
        """The slope of each head."""
        power = 1 << (self.p.num_heads.bit_length() - 1)
        more = [2.0 ** (-4 * i / power) for i in range(1, 2 * power, 2)]
        slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
        return slopes + more[: self.p.num_heads - power]

    def Bias(self, theta: NestedMap, query_at: tf.Tensor, key_at: tf.Tensor) -> tf.Tensor:
        slopes = self.Shard(tf.constant(self.Slopes()), "N")
        distance = tf.abs(query_at[:, :, tf.newaxis] - key_at[:, tf.newaxis])
        return tf.cast(-distance, tf.float32)[:, tf.newaxis] * slopes[:, tf.newaxis, tf.newaxis]


class RelativeBuckets(ScoreBias):
    """Adds to each score a learned number of its head and of the bucket that the distance of query and key lies in
    (Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section
    2.1).

    Half of the buckets have one distance each; the others grow with its logarithm up to `max_distance`, and the last
    one has all that is farther. In an encoder half of all buckets are for keys after the query.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("num_buckets", 32, "W, even in an encoder.", checks.SIZE)
        p.Define("max_distance", 128, "From this distance on all are in one bucket.", checks.SIZE)
        p.Define("shared", True, "Whether all layers of a stack have one table; else each has one.")
        p.Define(
            "bidirectional",
            False,
            "Whether keys after the query have buckets of their own.",
            parent_sets="a model sets it for its encoder",
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        least = 4 if p.bidirectional else 2
        if p.num_buckets < least or p.num_buckets % (least // 2):
            why = f"must be at least {least}" + (", and even, in an encoder" if least == 4 else "")
            raise ParamError(f"{self.path}.num_buckets", str(p.num_buckets), why)
        single = p.num_buckets // least
        if p.max_distance <= single:
            why = f"must be more than {single}, as num_buckets={p.num_buckets} has so many for one distance each"
            raise ParamError(f"{self.path}.max_distance", str(p.max_distance), why)
        if not p.shared:
            shape, init = (p.num_buckets, p.num_heads), WeightInit.FanIn(p.num_buckets)
            self.CreateVariable("table", WeightParams(shape, "WN", init))

    @classmethod
    def OfStack(cls, params: InstantiableParams) -> InstantiableParams | None:
        return params.Copy().Set(shared=False) if params.shared else None

    def Ranges(self) -> list[tuple[int, int]]:
        """The least and the largest distance of each bucket, query minus key; of an empty one the least is larger."""
        p, far = self.p, 2**30
        num = p.num_buckets // 2 if p.bidirectional else p.num_buckets
        single = num // 2
        growth = (p.max_distance / single) ** (1 / (num - single))
        # Rounded up, but for the error of a power that is a whole number.
        first = [math.ceil(single * growth**i * (1 - 1e-9)) for i in range(num - single)]
        first = [*range(single), *first, far]
        before = [(low, high - 1) for low, high in itertools.pairwise(first)]
        if not p.bidirectional:
            return [(-far, 0), *before[1:]]
        return before + [(-high, -max(low, 1)) for low, high in before]

    def Bias(self, theta: NestedMap, query_at: tf.Tensor, key_at: tf.Tensor) -> tf.Tensor:
        if "table" not in theta:
            raise ValueError(
                f"{self.path}: the layers of a stack share the table; a layer of its own needs shared=False"
            )
        # A product with a matrix of zeros and ones, whose gradient is another: it partitions as products do.
        least, most = (tf.constant(bounds) for bounds in zip(*self.Ranges(), strict=True))
        distance = (query_at[:, :, tf.newaxis] - key_at[:, tf.newaxis])[..., tf.newaxis]
        inside = tf.logical_and(distance >= least, distance <= most)
        table = self.Shard(tf.cast(theta.table, tf.float32), "WN")
        return tf.einsum("BTSW,WN->BNTS", tf.cast(inside, tf.float32), table)


POSITIONS: Mapping[str, type[Positions]] = {
    "alibi": Alibi,
    "llama3": Llama3Rotary,
    "none": Positions,
    "rotary": Rotary,
    "sinusoidal": PositionalEmbedding,
    "t5": RelativeBuckets,
    "yarn": YarnRotary,
}
