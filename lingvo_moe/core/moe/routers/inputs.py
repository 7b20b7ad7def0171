"""The inputs of a router: each token's context, and the level, token, sentence or task, at which a router decides.

Kudugunta et al. 2021 (Beyond Distillation: Task-level Mixture-of-Experts for Efficient Inference) compare the three
levels for translation. A level only changes the input of the gating network, so any learned router works at any level.
Chance (jitter, noise, a sampled second choice) and capacity are still each token's own.

Letters: B batch, T time, G group, S and Z token in group, M model, U task.
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.nested_map import NestedMap

CONTEXT = {
    "ids": "the number of the token in its vocabulary",
    "segment_ids": "0 for padding, 1, 2, ... for the sentences of a row",
    "task_ids": "the number of the task, for a translation model of the source language",
}


def needed(path: str, names: Sequence[str], context: NestedMap | None) -> NestedMap | None:
    """The entries of a context, int32 [B,T] each, that a router needs; None where it needs none.

    Raises:
        ValueError: an entry that it needs is missing.
    """
    for name in names:
        if context is None or name not in context:
            given = ", ".join(sorted(context or {})) or "none"
            raise ValueError(
                f"{path} routes by {name} ({CONTEXT[name]}): it must be in `context`, int32 [B,T]; "
                f"given: {given}"
            )
    return NestedMap({name: context[name] for name in names}) if context and names else None


def grouped(path: str, context: NestedMap, groups: int, size: int) -> NestedMap:
    """A context [B,T] in the groups of the tokens, [G,S].

    Segment ids become unique in the batch: those of different rows differ.

    Raises:
        ValueError: segment ids in groups smaller than a row, which would split sentences.
    """
    out = NestedMap()
    for name, value_BT in context.items():
        if name == "segment_ids":
            batch, time = value_BT.shape.as_list()
            if size % time:
                raise ValueError(
                    f"{path} routes by sentence, but {groups} groups of {size} tokens split rows of "
                    f"{time}: num_groups must divide the {batch} rows, or be 0"
                )
            value_BT += (time + 1) * tf.range(batch)[:, tf.newaxis]
        out[name] = tf.reshape(value_BT, [groups, size])
    return out


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
        "The unit of the decision: each 'token', a 'sentence' (the mean of its tokens) for all of its "
        "tokens, or the 'task' (an embedding of the source language's number).",
        check=checks.one_of(LEVELS),
    )
    p.Define("num_tasks", 0, "With level 'task': how many tasks there are.", check=checks.COUNT)


def check_level(path: str, p: Params) -> None:
    """Raises ValueError for level 'task' without num_tasks, or num_tasks with another level."""
    if (p.level == "task") != (p.num_tasks > 0):
        raise ValueError(
            f"{path}.level={p.level!r} with {path}.num_tasks={p.num_tasks}: level 'task' needs the "
            "number of tasks (of languages, for a translation model), other levels have none"
        )


def context_for(p: Params) -> tuple[str, ...]:
    """The entries of `context` that the level needs."""
    return _NEEDS[p.level]


def real_tokens(paddings_GS: tf.Tensor) -> tf.Tensor:
    """float32 [G,S], 1 for tokens and 0 for padding."""
    return 1.0 - tf.cast(paddings_GS, tf.float32)


def sentence_means(
    x_GSM: tf.Tensor, segment_ids_GS: tf.Tensor, paddings_GS: tf.Tensor
) -> tf.Tensor:
    """For each token the mean over the real tokens of its segment, float32 [G,S,M]; 0 at padding.

    Args:
        x_GSM: any float type.
        segment_ids_GS: int32; tokens of a group with the same number are one sentence.
        paddings_GS: bool or float, 1 for padding.
    """
    real_GS = real_tokens(paddings_GS)
    same_GSZ = tf.equal(segment_ids_GS[:, :, tf.newaxis], segment_ids_GS[:, tf.newaxis, :])
    pairs_GSZ = real_GS[:, :, tf.newaxis] * real_GS[:, tf.newaxis, :]
    same_GSZ = tf.cast(same_GSZ, tf.float32) * pairs_GSZ
    # The matrix product itself averages; the mean over padding alone is 0.
    count_GS1 = tf.maximum(tf.reduce_sum(same_GSZ, -1, keepdims=True), 1.0)
    share_GSZ = same_GSZ * kernels.current().batch_independent(tf.math.reciprocal, count_GS1)
    return tf.einsum("GSZ,GZM->GSM", share_GSZ, tf.cast(x_GSM, tf.float32))


def task_vectors(task_emb_UM: tf.Tensor, task_ids_GS: tf.Tensor) -> tf.Tensor:
    """The embedding of each token's task, float32 [G,S,M].

    A product with one-hot vectors: its gradient is a product too, which XLA shards, where the gradient of a
    gather is a scatter.
    """
    table_UM = tf.cast(task_emb_UM, tf.float32)
    hot_GSU = tf.one_hot(task_ids_GS, table_UM.shape[0])
    return tf.einsum("GSU,UM->GSM", hot_GSU, table_UM)
