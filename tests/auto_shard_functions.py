"""Functions whose best sharding is known, for tests of auto_shard. Letters: see core/sharding/letters.py."""

import tensorflow as tf

from lingvo_moe.core.engine.lowering.specs import TensorSpec


def spec(*shape: int) -> TensorSpec:
    """The spec of a float32 tensor."""
    return TensorSpec(shape, "float32")


def perceptron(x_BM: tf.Tensor, w1_MH: tf.Tensor, w2_HM: tf.Tensor) -> tf.Tensor:
    """Two layers, and a loss."""
    return tf.reduce_sum(tf.square(tf.nn.relu(x_BM @ w1_MH) @ w2_HM))


def norm(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Layer normalization."""
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(x - mean), -1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-6) * scale


def block(x_BTM: tf.Tensor, w: dict[str, tf.Tensor]) -> tf.Tensor:
    """A layer of a Transformer; queries, keys and values in one product."""
    y = norm(x_BTM, w["scale1_M"])
    q, k, v = tf.unstack(tf.einsum("BTM,MPNK->PBTNK", y, w["qkv_MPNK"]))
    probs = tf.nn.softmax(tf.einsum("BTNK,BSNK->BNTS", q, k))
    x_BTM += tf.einsum("BTNK,NKM->BTM", tf.einsum("BNTS,BSNK->BTNK", probs, v), w["o_NKM"])
    y = norm(x_BTM, w["scale2_M"])
    return x_BTM + tf.nn.relu(y @ w["wi_MH"]) @ w["wo_HM"]


def block_specs(m: int, n: int, k: int, h: int) -> dict[str, TensorSpec]:
    """The weights of a block."""
    return {
        "scale1_M": spec(m),
        "scale2_M": spec(m),
        "qkv_MPNK": spec(m, 3, n, k),
        "o_NKM": spec(n, k, m),
        "wi_MH": spec(m, h),
        "wo_HM": spec(h, m),
    }


def transformer(x_BTM: tf.Tensor, layers: list[dict[str, tf.Tensor]]) -> tf.Tensor:
    """Blocks in sequence, and a loss."""
    for weights in layers:
        x_BTM = block(x_BTM, weights)
    return tf.reduce_sum(tf.square(x_BTM))


def experts(
    x_GSM: tf.Tensor,
    dispatch_GSEC: tf.Tensor,
    combine_GSEC: tf.Tensor,
    wi_EMH: tf.Tensor,
    wo_EHM: tf.Tensor,
) -> tf.Tensor:
    """The paper's Algorithm 2 without its annotations."""
    slots_EGCM = tf.einsum("GSEC,GSM->EGCM", dispatch_GSEC, x_GSM)
    h_EGCH = tf.nn.relu(tf.einsum("EGCM,EMH->EGCH", slots_EGCM, wi_EMH))
    out_GECM = tf.einsum("EGCH,EHM->GECM", h_EGCH, wo_EHM)
    return tf.einsum("GSEC,GECM->GSM", combine_GSEC, out_GECM)


def experts_specs(g: int, s: int, e: int, c: int, m: int, h: int) -> list[TensorSpec]:
    """The arguments of `experts`."""
    return [spec(g, s, m), spec(g, s, e, c), spec(g, s, e, c), spec(e, m, h), spec(e, h, m)]
