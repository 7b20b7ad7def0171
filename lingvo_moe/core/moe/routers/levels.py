"""At which level a learned router decides: for each token, for each sentence, or for each task.

Kudugunta et al. 2021 (Beyond Distillation: Task-level Mixture-of-Experts for Efficient Inference)
compare the three for translation. A level only changes what the gating network sees, so
any learned router works at any level. Chance (jitter, noise, a sampled second choice) and room are
still each token's own.

Letters: G group, S and Z token in group, M model, U task.
"""

import tensorflow as tf

from lingvo_moe.core import checks, kernels
from lingvo_moe.core.hyperparams import Params

LEVELS = ("token", "sentence", "task")
_NEEDS: dict[str, tuple[str, ...]] = {
    "token": (),
    "sentence": ("segment_ids",),
    "task": ("task_ids",),
}


def define_level(p: Params) -> None:
    """Adds `level` and `num_tasks` to a router's Params."""
    p.Define(
        "level",
        "token",
        "What chooses: each 'token' for itself, a 'sentence' (the mean of its tokens) for all of "
        "them, or the 'task' (an embedding of the source language's number).",
        check=checks.one_of(LEVELS),
    )
    p.Define("num_tasks", 0, "With level 'task': how many tasks there are.", check=checks.COUNT)


def check_level(path: str, p: Params) -> None:
    """Raises ValueError for tasks without a number of them, or a number without tasks."""
    if (p.level == "task") != (p.num_tasks > 0):
        raise ValueError(
            f"{path}.level={p.level!r} with {path}.num_tasks={p.num_tasks}: level 'task' needs the "
            "number of tasks (of languages, for a translation model), other levels have none"
        )


def context_for(p: Params) -> tuple[str, ...]:
    """What the level needs to know of the tokens."""
    return _NEEDS[p.level]


def sentence_means(
    x_GSM: tf.Tensor, segment_ids_GS: tf.Tensor, paddings_GS: tf.Tensor
) -> tf.Tensor:
    """For each token the mean over the real tokens of its segment, float32 [G,S,M]; 0 at padding.

    Args:
        x_GSM: any float type.
        segment_ids_GS: int32; tokens of a group with the same number are one sentence.
        paddings_GS: bool or float, 1 for padding.
    """
    real_GS = 1.0 - tf.cast(paddings_GS, tf.float32)
    same_GSZ = tf.equal(segment_ids_GS[:, :, tf.newaxis], segment_ids_GS[:, tf.newaxis, :])
    pairs_GSZ = real_GS[:, :, tf.newaxis] * real_GS[:, tf.newaxis, :]
    same_GSZ = tf.cast(same_GSZ, tf.float32) * pairs_GSZ
    # Averaged by the matrix product itself: no mean is computed twice, and none of padding alone.
    count_GS1 = tf.maximum(tf.reduce_sum(same_GSZ, -1, keepdims=True), 1.0)
    share_GSZ = same_GSZ * kernels.current().batch_independent(tf.math.reciprocal, count_GS1)
    return tf.einsum("GSZ,GZM->GSM", share_GSZ, tf.cast(x_GSM, tf.float32))


def task_vectors(task_emb_UM: tf.Tensor, task_ids_GS: tf.Tensor) -> tf.Tensor:
    """The embedding of each token's task, float32 [G,S,M].

    A product with one-hot vectors: its gradient is a product too, which is cut like one, where a
    gather's is a scatter.
    """
    table_UM = tf.cast(task_emb_UM, tf.float32)
    hot_GSU = tf.one_hot(task_ids_GS, table_UM.shape[0])
    return tf.einsum("GSU,UM->GSM", hot_GSU, table_UM)
