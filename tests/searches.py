"""A model whose random weights give varied searches, lines for it, and a check that rows do not affect each other.

Letters: B row, S source token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from rows import assert_rows_equal

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh


def task_params(vocab_size: int, **sizes: Any) -> InstantiableParams:
    """The task of an mt.M4Demo with two heads of 32 and these parameters."""
    return registry.GetParams("mt.M4Demo", "").task.Set(
        source_vocab_size=vocab_size,
        target_vocab_size=vocab_size,
        model_dim=64,
        num_heads=2,
        key_dim=32,
        **sizes,
    )


def make_theta(model: Any) -> NestedMap:
    """Weights with which some lines end early, at different steps."""
    with use_mesh(single_device()):
        theta = model.InitTheta(make_seed(4, 0))
    table = theta.target_embedding.table.numpy()
    table[2] *= 1.5
    theta.target_embedding.table = tf.constant(table)
    return theta


def make_model(vocab_size: int, **sizes: Any) -> tuple[Any, NestedMap]:
    """A model of `task_params`, and its weights."""
    model = task_params(vocab_size, **sizes).Instantiate()
    return model, make_theta(model)


class Lines:
    """Returns lines of random tokens of these lengths."""

    def __init__(self, lengths: Sequence[int], vocab_size: int):
        rng = np.random.default_rng(1)
        self._lines = [rng.integers(4, vocab_size, n) for n in lengths]

    def __getitem__(self, number: int) -> np.ndarray:
        return self._lines[number]

    def __iter__(self):
        return iter(self._lines)

    def Rows(self, rows: Sequence[int | None], size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids [B,S] and lengths [B] of lines by number; None is an empty line."""
        ids = np.zeros((len(rows), size), np.int32)
        lengths = np.array([0 if i is None else len(self._lines[i]) for i in rows], np.int32)
        for row, i in zip(ids, rows, strict=True):
            if i is not None:
                row[: len(self._lines[i])] = self._lines[i]
        return ids, lengths

    def CheckAlone(
        self,
        search: Callable[..., NestedMap],
        together: NestedMap,
        more: Sequence[tuple[Sequence[int | None], int]],
    ) -> None:
        """Fails unless a search finds for each line the tokens and scores that it found for all of them together.

        Args:
            search: of Rows.
            together: what it found for all, in order.
            more: batches besides each line alone: lines by number, and S.
        """
        batches = [([i], -(-len(line) // 16) * 16) for i, line in enumerate(self._lines)]
        for rows, size in [*batches, *more]:
            got = search(*self.Rows(rows, size))
            for row, i in enumerate(rows):
                if i is None:
                    continue
                steps = min(got.ids_BKT.shape[2], together.ids_BKT.shape[2])
                np.testing.assert_array_equal(
                    got.ids_BKT[row, :, :steps], together.ids_BKT[i, :, :steps]
                )
                np.testing.assert_array_equal(got.lengths_BK[row], together.lengths_BK[i])
                assert_rows_equal(got.scores_BK[row], together.scores_BK[i])


def source(ids: tf.Tensor, lengths: tf.Tensor, longest: int) -> tuple[NestedMap, tf.Tensor]:
    """Returns arguments of Decoder.Search for Rows: the source, and the maximum length of each translation."""
    at = tf.range(tf.shape(ids)[1])[tf.newaxis]
    real = tf.cast(at < lengths[:, tf.newaxis], tf.int32)
    src = NestedMap(ids=ids * real, segment_ids=real, segment_pos=at * real)
    return src, tf.where(lengths > 0, tf.minimum(lengths + 4, longest), 0)
