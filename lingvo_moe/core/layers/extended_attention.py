"""Self-attention with the parts of recent language models, each switched on by a parameter.

Letters: B batch, T query, S key, M model, N head, A head of keys and values, K key dimension.
"""

from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.normalization import normalized
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import shape_of

_QK_NORMS = ("none", "head", "projection", "unit")


class ExtendedAttention(MultiHeadAttention):
    """MultiHeadAttention with normalized queries and keys, sinks, windows, chunks and layers without positions.

    A decoder's masks stay as they are: a window or a chunk only takes keys away. Without any of the parts it computes
    what MultiHeadAttention does.
    """

    NEEDS_POSITIONS: ClassVar[bool] = True
    BY_POSITIONS: ClassVar = ("position", "window", "chunk", "temperature_length")
    PackWeights = BaseLayer.PackWeights

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "qk_norm",
            "none",
            "How queries and keys are normalized, as RmsNorm does: 'head', each head (Qwen3); 'projection', all heads "
            "together (OLMoE); 'unit', each head after it took its position, without weights (Llama 4).",
            checks.one_of(_QK_NORMS),
        )
        p.Define("norm_epsilon", 1e-6, "Added to the mean square in qk_norm.", checks.POSITIVE)
        p.OnlyWith("norm_epsilon", lambda p: "qk_norm=none" if p.qk_norm == "none" else "")
        p.Define(
            "sinks",
            False,
            "Whether each head has a learned logit in the denominator of its softmax (gpt-oss).",
        )
        p.Define(
            "window",
            0,
            "How many tokens a query looks at, itself and those before it; 0: all.",
            checks.COUNT,
        )
        p.Define(
            "chunk",
            0,
            "A query looks at those tokens alone whose position divided by this, rounded down, is its own; 0: at all.",
            checks.COUNT,
        )
        p.Define("use_positions", True, "False: queries and keys take no positions (NoPE).")
        p.Define(
            "temperature_length",
            0,
            "n > 0: queries are multiplied by 1 + temperature_scale log(1 + floor((position + 1) / n)) (Llama 4).",
            checks.COUNT,
        )
        p.Define("temperature_scale", 0.1, "See temperature_length.", checks.POSITIVE)
        p.OnlyWith(
            "temperature_scale", lambda p: "" if p.temperature_length else "temperature_length=0"
        )
        return p

    def __init__(self, params: InstantiableParams):
        if not params.use_positions:
            params = params.Copy().Set(position=None)
        super().__init__(params)

    def _CreateWeights(self) -> tuple[int, int]:
        sizes = super()._CreateWeights()
        p, vector = self.p, WeightParams.Vector
        shapes = {name: (w.shape[1:], w.letters[1:]) for name, w in self._weights.items()}
        if p.qk_norm in ("head", "projection"):
            for name in "qk":
                shape, letters = shapes[name]
                if p.qk_norm == "head":
                    shape, letters = shape[-1:], letters[-1:]
                self.CreateVariable(f"{name}_norm", vector(shape, letters, 1.0))
        if p.sinks:
            self.CreateVariable("sinks", vector((p.num_heads,), "N", 0.0))
        return sizes

    def _Heads(
        self,
        theta: NestedMap,
        query: tf.Tensor | None,
        source: tf.Tensor | None,
        positions: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        kv = f"BS{self._kv}K"
        q, k, v = (
            None if x is None else self._Projected(theta, name, x, letters)
            for name, x, letters in (("q", query, "BTNK"), ("k", source, kv), ("v", source, kv))
        )
        q, k = self._Positioned(q, positions), self._Positioned(k, positions)
        if self.p.qk_norm == "unit":
            q, k = (x if x is None else self._Normalized(x, tf.ones([x.shape[-1]])) for x in (q, k))
        if q is not None:
            q *= tf.constant(self._scale, q.dtype)
            if self.p.temperature_length:
                q *= self._Temperature(self._Needed(positions), q.dtype)
        return q, k, v

    def _Projected(self, theta: NestedMap, name: str, x: tf.Tensor, letters: str) -> tf.Tensor:
        """The queries, keys or values of x, in the layout of the kernels in use."""
        y = tf.einsum("BTM,MNK->BTNK", x, self.Cast(theta[name]))
        if self.p.biases:
            y += self.Cast(theta[f"{name}_bias"])
        y = self.Shard(y, letters)
        if f"{name}_norm" in theta:
            y = self._Normalized(y, theta[f"{name}_norm"])
        return kernels.current().in_layout(y)

    def _Normalized(self, heads: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """RMS normalization over the dimensions of the scale, which are the last ones."""
        sizes = shape_of(heads)
        flat = [*sizes[: -scale.shape.rank], scale.shape.num_elements()]
        x, scale = tf.reshape(heads, flat), tf.reshape(scale, [-1])
        return tf.reshape(normalized(x, scale, None, self.p.norm_epsilon, heads.dtype), sizes)

    def _Temperature(self, positions: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """The factor of queries, by position."""
        lengths = tf.cast((positions + 1) // self.p.temperature_length, tf.float32)
        factor = 1.0 + self.p.temperature_scale * tf.math.log1p(lengths)
        return tf.cast(kernels.current().per_head(factor[..., tf.newaxis]), dtype)

    def _Near(
        self, mask: tf.Tensor, query_at: tf.Tensor | None, key_at: tf.Tensor | None
    ) -> tf.Tensor:
        p = self.p
        if not (p.window or p.chunk):
            return mask
        query = self._Needed(query_at)[:, :, tf.newaxis]
        key = self._Needed(key_at)[:, tf.newaxis]
        near = tf.cast(mask, tf.bool)
        if p.window:
            near &= query - key < p.window
        if p.chunk:
            near &= tf.equal(query // p.chunk, key // p.chunk)
        return near

    def _Segments(self, rows: NestedMap) -> tf.Tensor:
        """See MultiHeadAttention; chunks are segments of texts."""
        if not self.p.chunk:
            return rows.segments
        most = 1 + tf.shape(rows.positions)[1] // self.p.chunk
        return rows.segments * most + rows.positions // self.p.chunk

    def _Reach(self) -> int | None:
        return min(filter(None, (self.p.window, self.p.chunk)), default=None)

    def _Needed(self, positions: tf.Tensor | None) -> tf.Tensor:
        if positions is None:
            raise ValueError(
                f"{self.path}: window, chunk and temperature_length go by positions; FProp needs `positions`"
            )
        return positions
