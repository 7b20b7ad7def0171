"""A translation model with the smallest sizes that a mesh divides, and a batch for it: what `tools.verify` runs.

Letters: B batch, T time, M model, H hidden, N head, A head of keys and values, K key, E expert, G group,
V vocabulary.
"""

import math

import numpy as np

from lingvo_moe.core.base_input import BaseInput
from lingvo_moe.core.hyperparams import Params
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import parts_of

_FIRST_ID = 3  # those before it are padding and marks


def shrink(task: Params, inputs: Params, mesh: Mesh) -> None:
    """Sets the sizes of a model and of its batches; see BaseTask.Shrink."""

    def parts(letter: str) -> int:
        return parts_of(letter, mesh, (task.weight_split, task.activation_split))

    def size(letter: str, least: int) -> int:
        """The smallest multiple of the letter's parts that is not below `least`."""
        return parts(letter) * -(-least // parts(letter))

    groups = size("G", 1) if task.num_groups else 0
    kv_heads = size("A", 1) if task.num_kv_heads else 0
    unit = math.lcm(parts("N"), kv_heads or 1)
    heads = unit * -(-2 // unit)
    length = size("T", 8)
    layers = 2 * task.pipeline.stages * task.pipeline.repeats
    task.Set(
        model_dim=size("M", 8),
        hidden_dim=size("H", 16),
        expert_hidden_dim=size("H", 12) if task.expert_hidden_dim else 0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_dim=size("K", 4) if task.key_dim else 0,
        num_encoder_layers=min(task.num_encoder_layers, layers),
        num_decoder_layers=min(task.num_decoder_layers, layers),
        num_experts=size("E", 4) if task.num_experts else 0,
        num_groups=groups,
        source_vocab_size=size("V", 24),
        target_vocab_size=size("V", 20),
        fprop_dtype="float32",
    )
    inputs.Set(
        batch_size=math.lcm(parts("B"), groups or 1),
        source_length=length,
        target_length=length + parts("T"),
        source_vocab_size=task.source_vocab_size,
        target_vocab_size=task.target_vocab_size,
    )


def sample_batch(task: Params, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
    """Random ids in rows of two sentences, whose last token is padding; see BaseTask.SampleBatch."""
    batch = NestedMap()
    vocab = {"src": task.source_vocab_size, "tgt": task.target_vocab_size}
    for path, spec in inputs.BatchSpec().FlattenItems():
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
            ids = rng.randint(_FIRST_ID, vocab[side], spec.shape)
            batch.Set(path, ids.astype(spec.dtype))
            continue
        batch.Set(path, np.broadcast_to(row, spec.shape).astype(spec.dtype).copy())
    return batch
