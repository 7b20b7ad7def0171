"""SeqLayer and PipeliningLayer (Lingvo): layers before, cells in order, layers after."""

import functools
from typing import Any

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.nested_map import NestedMap, flatten
from lingvo_moe.core.pipeline.cell_program import Cell
from lingvo_moe.core.pipeline.cells import (
    Args,
    LayerWithExtras,
    fprop_with_extras,
    join_all_extras,
    meta_of_sequence,
)
from lingvo_moe.core.pipeline.gpipe import GPipe, PipelineError

_CELLS = "cells"


class SeqLayer(LayerWithExtras):
    """Applies layers one after another: `before_tpl`, `cell_tpl`, `after_tpl`. Each has a name of its own."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("before_tpl", [], "Params of the layers before the cells.")
        p.Define("cell_tpl", [], "Params of the cells, e.g. FeatureExtractionLayers.")
        p.Define("after_tpl", [], "Params of the layers after the cells.")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if not p.cell_tpl:
            raise ValueError(f"{p.name}: cell_tpl=[]: must have at least one cell")
        for layer in [*p.before_tpl, *p.cell_tpl, *p.after_tpl]:
            self.CreateChild(layer.name, layer)

    def FPropWithExtras(
        self, theta: NestedMap, args: Args, seed: tf.Tensor | None
    ) -> tuple[Args, NestedMap]:
        """See cells.HasExtras; the outputs are those of the last layer."""
        p = self.p
        return self._InSequence([*p.before_tpl, *p.cell_tpl, *p.after_tpl], theta, args, seed)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Any) -> NestedMap:
        """The sum of all layers."""
        layers = [*params.before_tpl, *params.cell_tpl, *params.after_tpl]
        return meta_of_sequence(layers, *input_shapes)


class PipeliningLayer(SeqLayer):
    """SeqLayer with a stage for each cell, which work on different micro-batches at the same time. See gpipe.py.

    Layers before and after see the whole batch, on all devices. `theta` has them by name, and the cells' weights packed
    in `cells`; `stage_vectors.from_paths` and `by_path` turn it into that of the SeqLayer and back. A mesh axis for
    letter Z in `weight_split` gives each stage its own devices; the axis has as many devices as there are cells.

    Extras of cells are means over micro-batches. A layer that computes statistics of the batch, e.g. BatchNorm,
    computes those of a micro-batch.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("num_micro_batches", 1, "M.", checks.SIZE)
        p.Define(
            "micro_batch_size",
            None,
            "Rows of a micro-batch; None: those of the batch divided by num_micro_batches.",
            checks.or_none(checks.SIZE),
        )
        p.Define("batch_dim", 0, "The dimension of all inputs that counts rows.", checks.COUNT)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        if _CELLS in self.children:
            raise ValueError(
                f"{self.p.name}: a layer cannot be named {_CELLS!r}, the name of the packed weights"
            )

    @functools.cached_property
    def _pipeline(self) -> GPipe:
        """Made when the layer's path is known."""
        layers = [(p.name, self.children[p.name]) for p in self.p.cell_tpl]
        cells = [Cell(cell.VariableSpecs(), self._Run(name, cell)) for name, cell in layers]
        return GPipe(self.path, _CELLS, cells, self.p.weight_split, self.p.activation_split)

    def _Run(self, name: str, cell: BaseLayer) -> Any:
        def run(theta: NestedMap, args: Args, seed: tf.Tensor | None) -> tuple[Args, NestedMap]:
            return fprop_with_extras(cell, theta, args, cell.FoldSeed(seed, name))

        return run

    def VariableSpecs(self) -> NestedMap:
        """The specs of the layers before and after, and the packed specs of the cells."""
        specs = super().VariableSpecs()
        for cell in self.p.cell_tpl:
            del specs[cell.name]
        specs[_CELLS] = self._pipeline.specs
        return specs

    def FPropWithExtras(
        self, theta: NestedMap, args: Args, seed: tf.Tensor | None
    ) -> tuple[Args, NestedMap]:
        """See cells.HasExtras; args are those of the first layer.

        Raises:
            PipelineError: micro_batch_size does not divide the rows, or contradicts num_micro_batches; or as GPipe.Run.
            ShardingError: as GPipe.Run.
        """
        p = self.p
        given, extras = self._InSequence(p.before_tpl, theta, tuple(args), seed)
        num = self._NumMicroBatches(given)
        outs, found = self._pipeline.Run(theta[_CELLS], given, num, p.batch_dim, seed)
        by_cell = NestedMap()
        for name, value in found.items():
            is_cell = name != "updates"
            by_cell[p.cell_tpl[int(name.removeprefix("cell_"))].name if is_cell else name] = value
        join_all_extras(extras, by_cell)
        outs, found = self._InSequence(p.after_tpl, theta, outs, seed)
        join_all_extras(extras, found)
        return outs, extras

    def _NumMicroBatches(self, args: Args) -> int:
        """M, for arguments of the first cell. Raises PipelineError."""
        p, size = self.p, self.p.micro_batch_size
        if size is None:
            return p.num_micro_batches
        rows = next(x for x in flatten(args) if x is not None).shape[p.batch_dim]
        where = f"{self.path}: micro_batch_size={size}"
        if rows % size:
            raise PipelineError(f"{where}: does not divide the {rows} rows of the batch")
        if not p.IsDefault("num_micro_batches") and p.num_micro_batches * size != rows:
            raise PipelineError(
                f"{where} and num_micro_batches={p.num_micro_batches}: make {size * p.num_micro_batches} rows, but the "
                f"batch has {rows}; set one of the two"
            )
        return rows // size
