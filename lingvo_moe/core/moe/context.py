"""What a router may know of a token beside its vector: which token, which sentence, which task.

Letters: B batch, T time, G group, S token in group.
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap

CONTEXT = {
    "ids": "the number of the token in its vocabulary",
    "segment_ids": "0 for padding, 1, 2, ... for the sentences of a row",
    "task_ids": "the number of the task, for a translation model of the source language",
}


def needed(path: str, names: Sequence[str], context: NestedMap | None) -> NestedMap | None:
    """Of a context, int32 [B,T] each, what a router needs; None where it needs nothing.

    Raises:
        ValueError: something that it needs is missing.
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
    """A context [B,T] cut into groups as the tokens are, [G,S].

    Sentences get numbers of their own: those of different rows are different ones.

    Raises:
        ValueError: segment ids in groups smaller than a row, which would cut sentences.
    """
    out = NestedMap()
    for name, value_BT in context.items():
        if name == "segment_ids":
            batch, time = value_BT.shape.as_list()
            if size % time:
                raise ValueError(
                    f"{path} routes by sentence, but {groups} groups of {size} tokens cut rows of "
                    f"{time}: num_groups must divide the {batch} rows, or be 0"
                )
            value_BT += (time + 1) * tf.range(batch)[:, tf.newaxis]
        out[name] = tf.reshape(value_BT, [groups, size])
    return out
