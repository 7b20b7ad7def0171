"""The biases that balance experts without a loss or a step size: quantiles of what a token's score lacks.

(Kimi K3 report 2026, section 2.3.3 and appendix D; Su Jianlin 2026, kexue.fm/archives/11619.) A token chooses the k
experts whose score plus bias is largest: those above a threshold alpha, which lies between its k-th and its (k+1)-th
largest sum. So a bias b wins an expert the share of tokens for which alpha - score < b. Balance is a share of k / E;
the next bias is therefore the k/E quantile of alpha - score over the step's tokens.

The report's alpha is the (k+1)-th sum itself; here it is the middle. With the former, every token's difference for its
next best expert is that expert's bias exactly, so that quantiles stop there, one bin apart, before loads are even.

The quantile is read from a histogram of integers, whose sum over devices is the same in any order.

Letters: G group, S token in group, k choice rank, E expert, B bin.
"""

import tensorflow as tf

from lingvo_moe.core.moe.routers.slots import sums_before
from lingvo_moe.core.sharding import DimsMapping, replicate
from lingvo_moe.core.sharding.annotate import mesh_of
from lingvo_moe.core.sharding.letters import axes_of, axis_of
from lingvo_moe.core.sharding.manual import manual_region
from lingvo_moe.core.sharding.mesh import traced_slices
from lingvo_moe.core.tensors import shape_of

BINS = 1000  # of each expert, as in the report


def balanced_bias(
    scores_GSE: tf.Tensor,
    index_GSk: tf.Tensor,
    real_GS: tf.Tensor,
    bias_E: tf.Tensor,
    split: DimsMapping,
) -> tf.Tensor:
    """The next bias, float32 [E] with mean 0, the same for any sharding of the tokens. No gradient flows.

    It is off the exact quantile by a bin at most, (max b - min b + 2) / BINS. Without a token it is `bias_E`.

    Args:
        scores_GSE: float32, from 0 to 1.
        index_GSk: int32, the k experts of each token with the largest scores plus `bias_E`; k < E.
        real_GS: float32, 1 for tokens and 0 for padding, which is not counted.
        bias_E: the bias that they were chosen with.
        split: the mesh axes of the dimensions of `scores_GSE`.
    """
    scores_GSE = tf.stop_gradient(scores_GSE)
    ranks, num_experts = index_GSk.shape[-1], bias_E.shape[0]
    chosen_GSE = tf.reduce_any(tf.one_hot(index_GSk, num_experts, True, False, dtype=tf.bool), 2)
    biased_GSE = scores_GSE + bias_E
    next_GS1 = tf.reduce_max(tf.where(chosen_GSE, float("-inf"), biased_GSE), -1, keepdims=True)
    last_GS1 = tf.reduce_min(tf.where(chosen_GSE, biased_GSE, float("inf")), -1, keepdims=True)
    alpha_GS1 = 0.5 * (next_GS1 + last_GS1)
    # All differences lie in this range, since each sum is a score from 0 to 1 plus a bias.
    lowest = tf.reduce_min(bias_E) - 1.0
    width = (tf.reduce_max(bias_E) + 1.0 - lowest) * (1.0 / BINS)
    bin_GSE = tf.cast((alpha_GS1 - scores_GSE - lowest) / width, tf.int32)
    bin_GSE = tf.clip_by_value(bin_GSE, 0, BINS - 1)
    counts_BE = _counts(tf.where(real_GS[:, :, tf.newaxis] > 0, bin_GSE, -1), split)
    tokens = tf.reduce_sum(counts_BE[:, 0])
    wanted = tf.cast(tokens, tf.float32) * (ranks / num_experts)
    before_BE = sums_before(counts_BE[tf.newaxis])[0]
    below_BE = tf.cast(tf.cast(before_BE + counts_BE, tf.float32) < wanted, tf.int32)
    bin_E = tf.reduce_sum(below_BE, 0)
    here_BE = tf.equal(tf.range(BINS)[:, tf.newaxis], bin_E)
    before_E, count_E = (
        tf.cast(tf.reduce_sum(tf.where(here_BE, x, 0), 0), tf.float32)
        for x in (before_BE, counts_BE)
    )
    part_E = (wanted - before_E) / tf.maximum(count_E, 1.0)
    quantile_E = lowest + width * (tf.cast(bin_E, tf.float32) + part_E)
    centred_E = quantile_E - tf.reduce_sum(quantile_E) * (1.0 / num_experts)
    return tf.where(tokens > 0, centred_E, bias_E)


def _counts(bin_GSE: tf.Tensor, split: DimsMapping) -> tf.Tensor:
    """int32 [B,E], replicated: how often each bin occurs for an expert; negative ones are not counted."""

    def of_device(bin_gse: tf.Tensor) -> tf.Tensor:
        experts = shape_of(bin_gse)[-1]
        place_gse = tf.where(bin_gse < 0, -1, bin_gse * experts + tf.range(experts))
        one_gse = tf.ones_like(place_gse)
        counts = tf.math.unsorted_segment_sum(one_gse, place_gse, BINS * experts)
        return tf.reshape(counts, [1, BINS, experts])

    # In a stage of a pipeline a region's results must not depend on the number of devices: all count all tokens.
    plain = mesh_of("balanced_bias", None).size == 1 or traced_slices()
    group, token, expert = (None,) * 3 if plain else split
    tokens = axis_of((*axes_of(group), *axes_of(token)))
    region = manual_region(of_device, [(group, token, expert)], (tokens, None, expert))
    # The one sum over devices.
    return replicate(tf.reduce_sum(region(bin_GSE), 0))
