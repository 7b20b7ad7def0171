"""Transformer tasks with the smallest sizes that a mesh divides, and batches for them: what `tools.verify` runs.

Letters: B batch, T time, M model, H hidden, N head, A head of keys and values, K key, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import parts_of

Size = Callable[[str, int], int]
_FIRST_ID = 3  # those before it are padding and marks


def parts(task: Params, letter: str, mesh: Mesh) -> int:
    """The number of parts into which the mesh divides a letter's dimension."""
    return parts_of(letter, mesh, (task.weight_split, task.activation_split))


def shrink_layers(task: Params, mesh: Mesh) -> Size:
    """Sets the sizes of layers, the number of layers of each stack, and float32.

    Returns:
        (letter, least) -> the smallest multiple of the letter's parts that is not below `least`.
    """

    def size(letter: str, least: int) -> int:
        count = parts(task, letter, mesh)
        return count * -(-least // count)

    kv_heads = size("A", 1) if task.num_kv_heads else 0
    unit = math.lcm(parts(task, "N", mesh), kv_heads or 1)
    layers = 2 * task.pipeline.stages * task.pipeline.repeats
    task.Set(
        model_dim=size("M", 8),
        hidden_dim=size("H", 16),
        num_heads=unit * -(-2 // unit),
        num_kv_heads=kv_heads,
        key_dim=size("K", 4) if task.key_dim else 0,
        fprop_dtype="float32",
    )
    for stack in task.cls.STACKS:
        task.Set(**{stack.num_layers: min(task.Get(stack.num_layers), layers)})
    return size


def sample_rows(
    specs: NestedMap, vocab_sizes: Mapping[str, int], rng: np.random.RandomState
) -> NestedMap:
    """Random ids in rows of two sentences, whose last token is padding.

    Args:
        specs: ArraySpecs of a batch, int32 [B,T], with paths such as 'src.ids' or 'ids'.
        vocab_sizes: V by what comes before the last dot of a path, e.g. 'src' or ''.
    """
    batch = NestedMap()
    for path, spec in specs.FlattenItems():
        side, _, name = path.rpartition(".")
        place = np.arange(spec.shape[1])
        half = spec.shape[1] // 2
        if name == "segment_ids":
            row = 1 + (place >= half) - 2 * (place == place[-1])
        elif name == "segment_pos":
            row = np.where(place < half, place, place - half)
        elif name == "task_ids":
            row = np.zeros_like(place)
        else:
            ids = rng.randint(_FIRST_ID, vocab_sizes[side], spec.shape)
            batch.Set(path, ids.astype(spec.dtype))
            continue
        batch.Set(path, np.broadcast_to(row, spec.shape).astype(spec.dtype).copy())
    return batch
