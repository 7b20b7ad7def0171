"""An image classifier with the smallest sizes that a mesh divides, and a batch for it: what `tools.verify` runs.

Letters: B batch, Y rows, X columns, I and O channels, M features, V classes.
"""

import math

import numpy as np

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import parts_of

_LARGEST_IMAGE = 16  # rows and columns, unless the mesh needs more
_PADDING = -1  # the label of a row without an image


def shrink(task: Params, inputs: Params, mesh: Mesh) -> None:
    """Sets the sizes of a model and of its batches; see BaseTask.Shrink."""
    maps = [
        split_map
        for params in (task, task.network, task.head)
        for split_map in (params.weight_split, params.activation_split)
    ]

    def size(letters: str, least: int) -> int:
        """The smallest multiple of the letters' parts that is not below `least`."""
        count = math.lcm(*(parts_of(letter, mesh, maps) for letter in letters))
        return count * -(-least // count)

    task.Set(num_classes=size("V", 8), fprop_dtype="float32")
    stages = task.pipeline.stages
    task.network.cls.Shrink(task.network, size("IOM", 4), stages)
    if stages > 1:
        task.pipeline.Set(
            micro_batches=min(task.pipeline.micro_batches, 2), image_size=_LARGEST_IMAGE
        )
    inputs.Set(
        batch_size=size("B", 4) * task.pipeline.micro_batches,
        image_size=size("YX", min(inputs.image_size, _LARGEST_IMAGE)),
    )


def sample_batch(task: Params, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
    """Random pixels and classes; the last row is padding; see BaseTask.SampleBatch."""
    specs = inputs.BatchSpec()
    images = rng.randint(0, 256, specs.images.shape).astype(specs.images.dtype)
    labels = rng.randint(0, task.num_classes, specs.labels.shape).astype(specs.labels.dtype)
    labels[-1] = _PADDING
    return NestedMap(images=images, labels=labels)
