"""Sampling of a token from logits: temperature, top-k and top-p, each row with its own settings and its own numbers.

Stateless: the number that a row draws depends on its seed and the step alone, so that a text does not depend on the
others of its batch.

Letters: B row, V vocabulary.
"""

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import dim

_COLDEST = 1e-30  # logits divided by less could be infinite

# The letters of the settings, for caches that grow; D is the two words of a seed.
LETTERS = NestedMap(temperature="B", top_k="B", top_p="B", seed="BD")


def sample(logits_BV: tf.Tensor, settings: NestedMap, step: tf.Tensor) -> tf.Tensor:
    """Draws a token for each row, int32 [B].

    Args:
        logits_BV: float32; -inf for what may not be drawn.
        settings: temperature, float32 [B], that logits are divided by, 0 for the largest one; then top_k, int32 [B],
            how many of the largest remain, 0 for all; then top_p, float32 [B]: of those the fewest whose probabilities
            sum to at least that remain. Equal logits remain together. seed, int32 [B, 2].
        step: int32 scalar, or [B].
    """
    greedy_B = settings.temperature <= 0.0
    largest_B = tf.argmax(logits_BV, 1, output_type=tf.int32)
    return tf.cond(
        tf.reduce_all(greedy_B),
        lambda: largest_B,
        lambda: tf.where(greedy_B, largest_B, _drawn(logits_BV, settings, step)),
    )


def penalized(logits_BV: tf.Tensor, seen_BV: tf.Tensor, penalty_B: tf.Tensor) -> tf.Tensor:
    """Logits by the repetition penalty of Sampling: of the tokens that are `seen`, bool."""
    penalty_B1 = penalty_B[:, tf.newaxis]
    less_BV = tf.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return tf.where(seen_BV, less_BV, logits_BV)


def above(logits_BV: tf.Tensor, min_p_B: tf.Tensor, temperature_B: tf.Tensor) -> tf.Tensor:
    """Logits, -inf for tokens with less than a share `min_p` of the likeliest one's probability at this temperature."""
    below_B = tf.where(min_p_B > 0, temperature_B * tf.math.log(min_p_B), float("-inf"))
    least_B = tf.reduce_max(logits_BV, 1) + below_B
    return tf.where(logits_BV >= least_B[:, tf.newaxis], logits_BV, float("-inf"))


def _drawn(logits_BV: tf.Tensor, settings: NestedMap, step: tf.Tensor) -> tf.Tensor:
    """Tokens by their probabilities; see `sample`."""
    greedy_B = settings.temperature <= 0.0
    temperature_B = tf.where(greedy_B, 1.0, tf.maximum(settings.temperature, _COLDEST))
    scaled_BV = logits_BV / temperature_B[:, tf.newaxis]
    unlike_B = ((settings.top_k > 0) | (settings.top_p < 1.0)) & ~greedy_B
    kept_BV = tf.cond(
        tf.reduce_any(unlike_B), lambda: _largest(scaled_BV, settings), lambda: scaled_BV
    )
    upto_BV = tf.cumsum(tf.nn.softmax(kept_BV), axis=1)
    word_B = randomness.word_of_each(randomness.fold_in(settings.seed, step))
    drawn_B = randomness.fractions(word_B) * upto_BV[:, -1]
    found_B = tf.math.count_nonzero(upto_BV <= drawn_B[:, tf.newaxis], 1, dtype=tf.int32)
    # Of a product that is rounded up to the sum of all, no token has a larger sum.
    none_B = found_B == dim(logits_BV, 1)
    return tf.where(none_B, tf.argmax(logits_BV, 1, output_type=tf.int32), found_B)


def _largest(logits_BV: tf.Tensor, settings: NestedMap) -> tf.Tensor:
    """The logits, -inf for those that top_k and top_p leave out."""
    all_V = dim(logits_BV, 1)
    k_B = tf.where(settings.top_k > 0, tf.minimum(settings.top_k, all_V), all_V)
    sorted_BV = tf.sort(logits_BV, axis=1, direction="DESCENDING")
    sorted_BV = tf.where(tf.range(all_V) < k_B[:, tf.newaxis], sorted_BV, float("-inf"))
    before_BV = tf.cumsum(tf.nn.softmax(sorted_BV), axis=1, exclusive=True)
    of_p_B = tf.math.count_nonzero(before_BV < settings.top_p[:, tf.newaxis], 1, dtype=tf.int32)
    number_B = tf.clip_by_value(tf.where(settings.top_p < 1.0, of_p_B, all_V), 1, k_B)
    least_B1 = tf.gather(sorted_BV, number_B[:, tf.newaxis] - 1, batch_dims=1)
    return tf.where(logits_BV >= least_B1, logits_BV, float("-inf"))
