"""A model small enough to be searched in plain NumPy, and a comparison of two searches."""

import numpy as np
import tensorflow as tf
from numpy_beam_search import BOS, PAD, beam_search
from tensorflow.compiler.tf2xla.python import xla

from lingvo_moe.core.decode.flat_beam_search import NEVER
from lingvo_moe.core.nested_map import NestedMap

D = 5  # of the toy models' "keys"


class ToyModel:
    """Logits from a sum over the prefix of token x position features, times the row's own matrix.

    `Score` computes them from the whole prefix. `Step` keeps the tokens' features in a flat cache
    and reaches those of a hypothesis through its mask, as attention does.
    """

    def __init__(self, seed: int, rows: int, vocab: int, max_length: int, scale: float = 2.0):
        rng = np.random.default_rng(seed)
        self.token_VD = rng.normal(size=(vocab, D)).astype(np.float32)
        self.time_TD = rng.normal(size=(max_length, D)).astype(np.float32)
        self.out_BDV = (scale * rng.normal(size=(rows, D, vocab))).astype(np.float32)
        self.rows, self.vocab, self.max_length = rows, vocab, max_length

    def Score(self, row: int, prefix: tuple[int, ...]) -> np.ndarray:
        fed = (BOS, *prefix)
        features = [self.token_VD[t] * self.time_TD[i] for i, t in enumerate(fed)]
        return np.tanh(np.sum(features, 0, dtype=np.float32)) @ self.out_BDV[row]

    def Cache(self, beam_size: int) -> NestedMap:
        return NestedMap(key_BSD=tf.zeros([self.rows, beam_size * self.max_length, D]))

    def Step(self, ids_BJ, cache, time, mask_BJS):
        new_BJD = tf.gather(self.token_VD, ids_BJ) * tf.gather(self.time_TD, time)
        J = ids_BJ.shape[1]
        at = [tf.constant(0), time * J, tf.constant(0)]
        cache.key_BSD = xla.dynamic_update_slice(cache.key_BSD, new_BJD, tf.stack(at))
        state_BJD = tf.tanh(tf.einsum("BJS,BSD->BJD", tf.cast(mask_BJS, tf.float32), cache.key_BSD))
        return tf.einsum("BJD,BDV->BJV", state_BJD, self.out_BDV), cache


def assert_plain(got, model, max_lengths, options, allowed=None) -> None:
    """Asserts that a search found the results of the plain one."""
    for row, max_length in enumerate(max_lengths):
        want = beam_search(
            lambda prefix, row=row: model.Score(row, prefix),
            max_length=max_length,
            beam_size=options.beam_size,
            top_k=options.top_k,
            length_alpha=options.length_alpha,
            allowed=allowed,
        )
        for k in range(options.top_k):
            length = got.lengths_BK[row, k]
            assert (got.ids_BKT[row, k, length:] == PAD).all()
            if k >= len(want):
                assert (length, got.scores_BK[row, k]) == (0, np.float32(NEVER))
                continue
            assert tuple(got.ids_BKT[row, k, :length]) == want[k].tokens, (row, k)
            np.testing.assert_allclose(got.scores_BK[row, k], want[k].score, rtol=2e-5, atol=2e-6)
