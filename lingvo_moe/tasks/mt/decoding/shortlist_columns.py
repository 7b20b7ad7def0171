"""A shortlist in a search: the tokens that each line is scored for, and their indices in the union of the batch.

The hypotheses of a search hold places (indices in the line's list) instead of token ids. Lists are in ascending order
and begin with PAD, BOS, EOS and UNK, so that the place of EOS is its id. Each step multiplies the table's rows of the
union of all lists of the batch once, and each line takes its own logits. A column's sum does not depend on the other
columns (packed_weights.py), so that neither a line's list nor its logits depend on the other lines.

Letters: B row, S source token, K candidate of a source piece, V vocabulary, J hypothesis, C place in a line's list,
U place in the union of the lists; T, of results, and K a result.
"""

import numpy as np
import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.shortlist import Shortlist
from lingvo_moe.tasks.text.vocabulary.special_ids import PAD_ID, UNK_ID

_MULTIPLE = 64  # of C and U: TensorFlow's softmax adds in fours of 16
LETTERS = NestedMap(tokens="BC", at="BC", bias="BC")  # of a batch's lists, in a cache
# Whether the first tokens of a list may be emitted; all later ones may. The search always allows EOS.
ALLOWED = np.arange(UNK_ID + 1) != UNK_ID


class ShortlistColumns(tf.Module):
    """A shortlist as variables, which a SavedModel keeps.

    Args:
        vocab_size: V, the number of target tokens.
        least: the smallest C.
    """

    def __init__(self, shortlist: Shortlist, vocab_size: int, least: int = 1):
        super().__init__(name="shortlist")
        narrow = tf.uint16 if vocab_size <= 2**16 else tf.int32
        candidates = tf.cast(tf.constant(shortlist.candidates), narrow)
        self._candidates = tf.Variable(candidates, trainable=False, name="candidates")
        always_V = np.isin(np.arange(vocab_size), shortlist.always)
        self._always = tf.Variable(always_V, trainable=False, name="always")
        self._vocab_size, self._least = vocab_size, least

    def Lists(self, ids_BS: tf.Tensor) -> tuple[NestedMap, tf.Tensor]:
        """Returns the lists for a batch of sources, int32 [B,S], and their union.

        Returns:
            NestedMap of three tensors [B,C]: tokens, int32, with PAD after the end of a shorter list; at, int32, the
            index of each token in the union; bias, float32, 0, or -inf after the end of a shorter list. And the union,
            int32 [U], in ascending order, filled up with 0 to a multiple of 64.
        """
        V = self._vocab_size
        rows = tf.shape(ids_BS)[0]
        with tf.name_scope("shortlist/"):
            candidates_BSK = tf.cast(tf.gather(self._candidates, ids_BS), tf.int32)
            row_B11 = tf.range(rows)[:, tf.newaxis, tf.newaxis]
            at = tf.reshape(candidates_BSK + row_B11 * V, [-1, 1])
            seen = tf.scatter_nd(at, tf.ones_like(at[:, 0]), tf.reshape(rows * V, [1]))
            seen_BV = (tf.reshape(seen, [rows, V]) > 0) | self._always
            tokens = tf.cast(tf.where(seen_BV)[:, 1], tf.int32)
            sizes_B = tf.math.count_nonzero(seen_BV, 1, dtype=tf.int32)
            longest = _filled_up(tf.maximum(tf.reduce_max(sizes_B), self._least))
            tokens_BC = tf.RaggedTensor.from_row_lengths(tokens, sizes_B, validate=False)
            tokens_BC = tokens_BC.to_tensor(PAD_ID, shape=tf.stack([rows, longest]))
            bias_BC = tf.where(tf.sequence_mask(sizes_B, longest), 0.0, -np.inf)

            any_V = tf.reduce_any(seen_BV, 0)
            union_U = tf.cast(tf.where(any_V)[:, 0], tf.int32)
            at_BC = tf.gather(tf.cumsum(tf.cast(any_V, tf.int32)) - 1, tokens_BC)
            size = tf.shape(union_U)[0]
            union_U = tf.pad(union_U, [[0, _filled_up(size) - size]])
        return NestedMap(tokens=tokens_BC, at=at_BC, bias=bias_BC), union_U


def logits_of_lists(lists: NestedMap, logits_BJU: tf.Tensor) -> tf.Tensor:
    """Selects the logits of each row's list from those of the union, [B,J,U]: float32 [B,J,C], -inf beyond its end."""
    logits_BJC = tf.gather(logits_BJU, lists.at, axis=2, batch_dims=1)
    return logits_BJC + lists.bias[:, tf.newaxis]


def tokens_of_places(lists: NestedMap, places: tf.Tensor) -> tf.Tensor:
    """Maps places in each row's list to token ids: int32 [B,J], or [B,K,T] for results, to the same shape."""
    return tf.gather(lists.tokens, places, batch_dims=1)


def _filled_up(size: tf.Tensor) -> tf.Tensor:
    """The size, rounded up to a multiple of _MULTIPLE."""
    return (size + (_MULTIPLE - 1)) // _MULTIPLE * _MULTIPLE
