"""A search as programs over a mesh: what comes before its first step, a step, and a block of steps.

Letters: B row, T token of what is read.
"""

from typing import Any, Protocol

import tensorflow as tf

from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.sharding import SplitMap, dims_mapping, single_device, use_mesh
from lingvo_moe.core.task.step import Step


class SearchInSteps(Protocol):
    """A model and a search in functions of tensors alone."""

    model: Any  # a TransformerTask
    search: FlatBeamSearch

    def Start(
        self, theta: NestedMap, inputs: NestedMap, max_lengths_B: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        """The state and the caches before the first step; `inputs` is a tree of tensors [B], [B,T] of what is read."""

    def Step(
        self, state: NestedMap, cache: NestedMap, theta: NestedMap
    ) -> tuple[NestedMap, NestedMap]:
        """One step; state and caches come out as they go in."""

    def Caches(self, theta: NestedMap, inputs: NestedMap) -> NestedMap:
        """Caches in which nothing is, for inputs whose shapes alone are of interest."""

    def CacheLetters(self, cache: NestedMap) -> NestedMap:
        """The letters of the caches' tensors."""


def decoding_programs(
    name: str, decoder: SearchInSteps, inputs: NestedMap, text: str = ""
) -> tuple[Step, Step]:
    """The programs of a search. Rows and heads are sharded as activations are, theta as in training.

    Args:
        name: of the first program.
        inputs: TensorSpecs, of B rows of all devices together, of what `Start` takes.
        text: determines the programs, see Step.

    Returns:
        (theta, inputs, max_lengths_B) -> (state, cache), and (state, cache, theta) -> (state, cache), donated.
    """
    model = decoder.model
    split, theta = model.p.activation_split, model.VariableSpecs()
    read = row_specs(inputs, split)
    lengths = _spec(TensorSpec(read.Flatten()[0].shape[:1], "int32"), "B", split)

    def before(
        theta: NestedMap, inputs: NestedMap, lengths_B: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        return decoder.search.Start(lengths_B), decoder.Caches(theta, inputs)

    with use_mesh(single_device()):
        plain = [
            map_structure(lambda s: tf.TensorSpec(s.shape, s.dtype), arg)
            for arg in (theta, read, lengths)
        ]
        traced = tf.function(before, autograph=False).get_concrete_function(*plain)
    state, cache = traced.structured_outputs
    state = letters_specs(state, decoder.search.STATE_LETTERS, split)
    cache = letters_specs(cache, decoder.CacheLetters(cache), split)
    start = Step(name, decoder.Start, (theta, read, lengths), results=(state, cache), text=text)
    return start, Step("decode_step", decoder.Step, (state, cache, theta), (0, 1), text=text)


def block_program(step: Step, search: FlatBeamSearch, size: int) -> Step:
    """The program of at most `size` steps: (state, cache, theta) -> (state, cache, report), donated.

    `report`, replicated, is for the host: FlatBeamSearch.Results of what has ended so far; `over`, a bool
    scalar; `done_B` and `ids_BS` of the state.

    Args:
        step: the second of decoding_programs.
    """

    def block(state: NestedMap, cache: NestedMap, theta: NestedMap) -> tuple:
        end = state.time + size

        def unfinished(state: NestedMap, cache: NestedMap) -> tf.Tensor:
            del cache
            return search.Unfinished(state) & (state.time < end)

        state, cache = tf.while_loop(
            unfinished, lambda *before: step.fn(*before, theta), (state, cache)
        )
        report = NestedMap(search.Results(state), over=~search.Unfinished(state))
        return state, cache, NestedMap(report, done_B=state.done_B, ids_BS=state.ids_BS)

    return Step("search_block", block, step.arg_specs, step.donate, text=step.text)


def row_specs(tree: NestedMap, split: SplitMap) -> NestedMap:
    """The TensorSpecs of a tree of arrays, or specs, whose first dimension is that of rows."""
    return tree.Transform(lambda x: _spec(x, "B" + "." * (len(x.shape) - 1), split))


def letters_specs(tree: NestedMap, letters: NestedMap, split: SplitMap) -> NestedMap:
    """The TensorSpecs of a tree of tensors, by the letters of their dimensions."""
    return map_structure(lambda value, dims: _spec(value, dims, split), tree, letters)


def _spec(value: Any, dims: str, split: SplitMap) -> TensorSpec:
    dtype = value.dtype if isinstance(value.dtype, str) else value.dtype.name
    return TensorSpec(tuple(value.shape), dtype, dims_mapping(dims, split))
