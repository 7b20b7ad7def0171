"""SeqLayer and PipeliningLayer (Lingvo): layers before, cells in order, layers after."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.cell_stack import CellParts, CellStack
from lingvo_moe.core.pipeline.cells import (
    Args,
    LayerWithExtras,
    join_all_extras,
    meta_of_sequence,
)
from lingvo_moe.core.pipeline.parts import Context

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
    """SeqLayer whose cells are the stages of a pipeline, where its task trains by stages (core/task/pipelined_step.py).

    `theta` has the layers before and after by name, and the cells' weights packed in `cells`;
    `stage_vectors.from_paths` and `by_path` turn it into that of the SeqLayer and back. A mesh axis for letter Z in
    `weight_split` gives each stage its own weights. A task returns `Parts` of the layer as its PipelineParts; FProp
    applies the layers to a whole batch one after another.
    """

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        if _CELLS in self.children:
            raise ValueError(
                f"{self.p.name}: a layer cannot be named {_CELLS!r}, the name of the packed weights"
            )

    @functools.cached_property
    def _stack(self) -> CellStack:
        """Made when the layer's path is known."""
        p = self.p
        cells = [[(cell.name, self.children[cell.name])] for cell in p.cell_tpl]
        return CellStack(self.path, _CELLS, cells, p.weight_split)

    def VariableSpecs(self) -> NestedMap:
        """The specs of the layers before and after, and the packed specs of the cells."""
        specs = super().VariableSpecs()
        for cell in self.p.cell_tpl:
            del specs[cell.name]
        specs[_CELLS] = self._stack.specs
        return specs

    def FPropWithExtras(
        self, theta: NestedMap, args: Args, seed: tf.Tensor | None
    ) -> tuple[Args, NestedMap]:
        """See cells.HasExtras; args are those of the first layer."""
        args, extras = self._InSequence(self.p.before_tpl, theta, tuple(args), seed)
        args, of_cells = self._stack.InSequence(theta[_CELLS], args, seed)
        join_all_extras(extras, of_cells)
        args, of_rest = self._InSequence(self.p.after_tpl, theta, args, seed)
        join_all_extras(extras, of_rest)
        return args, extras

    def Parts(
        self,
        path: str,
        args: Callable[[Context], Args],
        loss: Callable[[Args, Context], tuple[tf.Tensor, NestedMap]],
        **options: Any,
    ) -> CellParts:
        """The layer as the parts of its task, whose stages are the cells.

        Args:
            path: where the task's theta has the layer.
            args: computes the arguments of the first layer for a micro-batch.
            loss: computes loss and metrics from the outputs of the last layer, as Parts.loss.
            options: `metrics`, `added_loss` and `batch_dim` of CellParts. The extras of layers before and after are
                left out.
        """

        def outer(
            layers: Sequence[InstantiableParams], rest: NestedMap, x: Args, at: Context
        ) -> Args:
            return self._InSequence(layers, rest.GetItem(path), x, at.seed)[0]

        base: dict[str, Any] = {"metrics": lambda sums, loss, extras: NestedMap(sums, loss=loss)}
        return CellParts(
            name=self.p.name,
            weights=f"{path}.{_CELLS}",
            stack=self._stack,
            enter=lambda rest, context: outer(self.p.before_tpl, rest, args(context), context),
            loss=lambda rest, x, at: loss(outer(self.p.after_tpl, rest, x, at), at),
            **(base | options),
        )
