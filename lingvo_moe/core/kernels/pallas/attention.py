"""Causal self-attention by the fused kernel that JAX has for TPUs, "splash attention" of Pallas.

Its logits stay in the memory of a core, forward and backward, and blocks of which no query may see a key are not
computed.

Letters: B batch, T query, S key, N head, A head of keys and values, K key dimension.
"""

import functools
from typing import TYPE_CHECKING

import tensorflow as tf

from lingvo_moe.core.kernels import xla
from lingvo_moe.core.kernels.pallas import calls
from lingvo_moe.core.kernels.scores import Seen
from lingvo_moe.core.kernels.xla import Drop
from lingvo_moe.core.sharding.annotate import mesh_of
from lingvo_moe.core.sharding.letters import axes_of, dims_mapping
from lingvo_moe.core.sharding.manual import manual_region

if TYPE_CHECKING:
    import jax

_BLOCK, _LANES = 512, 128  # tokens of a block; the least that a TPU has


def attend(
    q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, seen: Seen, drop: Drop | None = None
) -> tf.Tensor:
    """See `Kernels`. Each device computes its rows and heads, of whole rows.

    The kernel has rows of a static length, no dropout, no bias, and blocks of its own; XLA's kernels do the rest.
    """
    unknown = (seen.mask, drop, seen.bias, seen.block)
    if any(value is not None for value in unknown):
        return xla.attend(q, k, v, seen, drop)
    mesh, length = mesh_of("attention", None), q.shape[1]
    # One device, whose mesh need not have the axes of split maps, has all rows and heads.
    rows, _, heads, _ = dims_mapping("BTNK", {} if mesh.size == 1 else seen.split)
    if k.shape[2] % mesh.axis_size(axes_of(heads)):
        # What the heads of a device look at is no even part of all.
        k, v = (tf.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    by_head = (rows, heads, None, None)
    ins = [by_head, by_head, by_head, (rows, None)]
    inputs = [_padded(x) for x in (q, k, v, seen.segments)]
    inputs[:3] = [tf.transpose(x, [0, 2, 1, 3]) for x in inputs[:3]]
    if seen.sinks_N is not None:
        ins.append((heads,))
        inputs.append(tf.cast(seen.sinks_N, tf.float32))
    local = functools.partial(calls.call, functools.partial(_splash, reach=seen.reach))
    with tf.name_scope(f"about_{_mean_keys(length, seen.reach)}_keys"):
        y = manual_region(local, ins, by_head)(*inputs)
    return tf.transpose(y, [0, 2, 1, 3])[:, :length]


def _mean_keys(length: int, reach: int | None) -> int:
    """The number of keys whose logits the kernel computes for a query, in the mean of a row of one segment."""
    size = _block_of(length)
    blocks, reach = -(-length // size), reach or length
    pairs = sum(i - max(0, i * size - reach + 1) // size + 1 for i in range(blocks))
    return pairs * size // blocks


def _block_of(length: int) -> int:
    return min(_BLOCK, -(-length // _LANES) * _LANES)


def _padded(x: tf.Tensor) -> tf.Tensor:
    """Pads each row with tokens of segment 0, up to a multiple of the block's length."""
    length, rest = x.shape[1], x.shape.rank - 2
    return tf.pad(x, [[0, 0], [0, -length % _block_of(length)], *[[0, 0]] * rest])


def _splash(
    q: "jax.Array",
    k: "jax.Array",
    v: "jax.Array",
    segments: "jax.Array",
    *sinks: "jax.Array",
    reach: int | None,
) -> "jax.Array":
    """The kernel on a device's queries [B,N,T,K], keys and values [B,A,S,K], segments [B,T] and, if any, sinks [N]."""
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    heads, length = q.shape[1:3]
    causal = splash.CausalMask((length, length))
    near = splash.LocalMask((length, length), (reach - 1, 0), 0) if reach else causal
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([near] * heads),
        block_sizes=splash.BlockSizes(**{f"block_{name}": _block_of(length) for name in names}),
        head_shards=1,
        q_seq_shards=1,
        interpret=calls.INTERPRETED,
    )

    def of_row(q: "jax.Array", k: "jax.Array", v: "jax.Array", ids: "jax.Array") -> "jax.Array":
        return kernel(q, k, v, splash.SegmentIds(ids, ids), *sinks)

    return jax.vmap(of_row)(q, k, v, segments)
