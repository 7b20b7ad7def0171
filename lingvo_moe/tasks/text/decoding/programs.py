"""A search as two programs over a mesh: what comes before its first step, and a step.

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
        self, theta: NestedMap, inputs: Any, max_lengths_B: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        """The state and the caches before the first step; `inputs` is a tree of int32 [B,T]."""

    def Step(
        self, state: NestedMap, cache: NestedMap, theta: NestedMap
    ) -> tuple[NestedMap, NestedMap]:
        """One step; state and caches come out as they go in."""

    def Caches(self, theta: NestedMap, shape: tuple[int, int]) -> NestedMap:
        """Caches in which nothing is, for B rows of T tokens, whose shapes alone are of interest."""

    def CacheLetters(self) -> NestedMap:
        """The letters of the caches' tensors."""


def decoding_programs(
    name: str, decoder: SearchInSteps, inputs: Any, shape: tuple[int, int]
) -> tuple[Step, Step]:
    """The programs of a search. Rows and heads are sharded as activations are, theta as in training.

    Args:
        name: of the first program.
        inputs: the structure of what `Start` takes.
        shape: B, of all devices together, and T.

    Returns:
        (theta, inputs, max_lengths_B) -> (state, cache), and (state, cache, theta) -> (state, cache), donated.
    """
    model = decoder.model
    split, theta = model.p.activation_split, model.VariableSpecs()
    row = dims_mapping("BT", split)
    read = map_structure(lambda _: TensorSpec(shape, "int32", row), inputs)
    lengths = TensorSpec(shape[:1], "int32", row[:1])

    def before(theta: NestedMap, lengths_B: tf.Tensor) -> tuple[NestedMap, NestedMap]:
        return decoder.search.Start(lengths_B), decoder.Caches(theta, shape)

    with use_mesh(single_device()):
        plain = [
            map_structure(lambda s: tf.TensorSpec(s.shape, s.dtype), arg)
            for arg in (theta, lengths)
        ]
        traced = tf.function(before, autograph=False).get_concrete_function(*plain)
    state, cache = traced.structured_outputs
    state = _sharded(state, decoder.search.STATE_LETTERS, split)
    cache = _sharded(cache, decoder.CacheLetters(), split)
    start = Step(name, decoder.Start, (theta, read, lengths), results=(state, cache))
    return start, Step("decode_step", decoder.Step, (state, cache, theta), (0, 1))


def _sharded(tree: NestedMap, letters: NestedMap, split: SplitMap) -> NestedMap:
    """The TensorSpecs of a tree of tensors, by the letters of their dimensions."""

    def spec(value: tf.Tensor, dims: str) -> TensorSpec:
        return TensorSpec(tuple(value.shape), value.dtype.name, dims_mapping(dims, split))

    return map_structure(spec, tree, letters)
