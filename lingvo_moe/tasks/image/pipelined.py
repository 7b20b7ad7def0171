"""The layers of a convolutional network as a pipeline. Letters: B batch, M features, Y rows, X columns, I channels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.cell_program import Cell
from lingvo_moe.core.pipeline.cells import Args, fprop_in_sequence
from lingvo_moe.core.pipeline.gpipe import GPipe
from lingvo_moe.core.pipeline.params import one_stage
from lingvo_moe.core.pipeline.partition import Partition

_PACKED = "pipeline"
# Paths in a task's Params, for BaseTask.MAY_CHANGE.
PARAMETERS = tuple(f"pipeline.{name}" for name in ("stages", "micro_batches", "image_size"))


def pipeline_params() -> Params:
    """`pipeline` of an image task."""
    p = Params()
    p.Define(
        "stages",
        1,
        "K: the network's layers are divided into so many stages of similar FLOPs, each of which has its weights on "
        "its own devices, along the mesh axis that weight_split has for Z. 1: no pipeline.",
        checks.SIZE,
    )
    p.Define(
        "micro_batches",
        1,
        "M: stages work on different ones of so many equal parts of a batch. (K-1)/(M+K-1) of a step is waiting.",
        checks.SIZE,
    )
    p.Define(
        "image_size",
        224,
        "Rows and columns of the images for which FLOPs of stages are balanced; it may differ from input.image_size.",
        checks.SIZE,
    )
    p.OnlyWith("micro_batches image_size", one_stage)
    return p


@dataclass(frozen=True)
class NamedLayer:
    """A layer, and its path in the theta of the network."""

    path: str
    layer: BaseLayer


class PipelinedLayers:
    """A network's layers as a pipeline. Its packed variables have the layers' own variables as parts.

    Args:
        layers: in order; the last one returns features.
        parts: which of them each stage has.
    """

    def __init__(
        self, network: BaseLayer, layers: Sequence[NamedLayer], parts: Partition, params: Params
    ):
        self._network, self._num = network, params.micro_batches
        cells = [self._Cell(part) for part in parts.Parts(layers)]
        p = network.p
        self._pipeline = GPipe(network.path, _PACKED, cells, p.weight_split, p.activation_split)

    def _Cell(self, layers: Sequence[NamedLayer]) -> Cell:
        named = [(layer.path, layer.layer) for layer in layers]
        specs = NestedMap(layers=[layer.layer.VariableSpecs() for layer in layers])

        def run(theta: NestedMap, args: Args, seed: tf.Tensor | None) -> tuple[Args, NestedMap]:
            return fprop_in_sequence(named, theta.layers, args, seed)

        return Cell(specs, run)

    def VariableSpecs(self) -> NestedMap:
        """The packed variables."""
        return NestedMap({_PACKED: self._pipeline.specs})

    def FProp(
        self, theta: NestedMap, images: tf.Tensor, training: bool
    ) -> tuple[tf.Tensor, NestedMap]:
        """Features [B, M] of images [B, Y, X, I], and extras, as Network.FProp. The images get no gradient."""
        seed = tf.zeros([2], tf.int32) if training else None  # Nothing is drawn from it.
        (features,), extras = self._pipeline.Run(
            theta[_PACKED], (images,), self._num, seed=seed, differentiate_inputs=False
        )
        return self._network.Shard(features, "BM"), extras


def at(tree: NestedMap, path: str) -> Any:
    """The element of a tree at a path such as stage_0.stages[2], also through layers."""
    found: Any = tree
    for part in path.split("."):
        name, _, index = part.partition("[")
        found = found[name] if isinstance(found, NestedMap) else found.children[name]
        found = found[int(index.rstrip("]"))] if index else found
    return found
