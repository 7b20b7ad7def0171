"""A shortlist in a search: which tokens each line is scored for, and where they are among those of its batch.

The search runs over places in its line's list, which rise with the token's id: the first four are PAD, BOS, EOS and
UNK, so that EOS is where it is without a shortlist. The table's rows of all lists of the batch, their union, are
multiplied once a step; a column's sum does not depend on the columns beside it (packed_weights.py), and each line
picks its own. So neither its list nor a logit depends on the lines beside it.

Letters: B row, S source token, K candidate of a source piece, V vocabulary, J hypothesis, C place in a line's list,
U place in the union of the lists; T, of results, and K a result.
"""

import numpy as np
import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.shortlist import Shortlist
from lingvo_moe.tasks.mt.input.special_ids import PAD_ID, UNK_ID

_MULTIPLE = 64  # of C and U: packed_weights.WIDTH; TensorFlow's softmax adds in fours of 16
LETTERS = NestedMap(tokens="BC", at="BC", bias="BC")  # of a batch's lists, in a cache
# In lists: which of the first tokens may come out (all that come after may). EOS may in any case.
ALLOWED = np.arange(UNK_ID + 1) != UNK_ID


class ShortlistColumns(tf.Module):
    """A shortlist as variables, which a SavedModel keeps.

    Args:
        shortlist: see there.
        vocab_size: V, tokens that may come out.
        least: of C.
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
        """The lists of a batch of sources, int32 [B,S].

        Returns:
            NestedMap of [B,C] each: tokens, int32, PAD where a list is shorter; at, int32, where each is in the union;
            bias, float32, 0, or -inf where a list is shorter. And the union, int32 [U], rising, filled up with 0.
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
    """Each row's own of the union's logits: float32 [B,J,C]."""
    logits_BJC = tf.gather(logits_BJU, lists.at, axis=2, batch_dims=1)
    return logits_BJC + lists.bias[:, tf.newaxis]


def tokens_of_places(lists: NestedMap, places: tf.Tensor) -> tf.Tensor:
    """The token at each place in its row's list: int32 [B,J], or results [B,K,T], to the same."""
    return tf.gather(lists.tokens, places, batch_dims=1)


def _filled_up(size: tf.Tensor) -> tf.Tensor:
    """The next multiple."""
    return (size + (_MULTIPLE - 1)) // _MULTIPLE * _MULTIPLE
