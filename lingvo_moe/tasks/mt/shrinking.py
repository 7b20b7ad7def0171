"""A translation model with the smallest sizes that a mesh divides, and a batch for it: what `tools.verify` runs.

Letters: B batch, T time, V vocabulary.
"""

import math

import numpy as np

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.tasks.experts import shrink_experts
from lingvo_moe.tasks.transformer_shrinking import parts, sample_rows, shrink_layers


def shrink(task: Params, inputs: Params, mesh: Mesh) -> None:
    """Sets the sizes of a model and of its batches; see BaseTask.Shrink."""
    size = shrink_layers(task, mesh)
    groups = shrink_experts(task, size)
    length = size("T", 8)
    task.Set(
        source_vocab_size=size("V", 24),
        target_vocab_size=size("V", 20),
    )
    inputs.Set(
        batch_size=math.lcm(parts(task, "B", mesh), groups or 1),
        source_length=length,
        target_length=length + parts(task, "T", mesh),
        source_vocab_size=task.source_vocab_size,
        target_vocab_size=task.target_vocab_size,
    )


def sample_batch(task: Params, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
    """Random ids in rows of two sentences, whose last token is padding; see BaseTask.SampleBatch."""
    vocab_sizes = {"src": task.source_vocab_size, "tgt": task.target_vocab_size}
    return sample_rows(inputs.BatchSpec(), vocab_sizes, rng)
