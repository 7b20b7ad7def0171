"""A search as programs over the mesh of an engine: one that begins it, one of a block of steps; the host has the loop.

So it runs on the devices that a model is trained on (GShard, appendix A.1), and no host needs to hold the weights. They
lie as in training, rows and caches as activations do.
"""

import math
from collections.abc import Callable, Iterator

from lingvo_moe.core.engine.base import Compiled, Engine
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.decoding.leading import Kind, LedPrograms
from lingvo_moe.tasks.text.decoding.programs import (
    SearchInSteps,
    block_program,
    decoding_programs,
)

BLOCK = 16  # steps of a program


class MeshSearch(LedPrograms):
    """Searches on the devices of an engine.

    Args:
        engine: whose programs run the search.
        theta: the weights, on its devices.
        searches: makes the search of a kind; it is asked once for each.
        text: determines the model and its options, with classes, so that programs can be kept.

    Attributes:
        programs: how many were built; each takes seconds.
    """

    def __init__(
        self,
        engine: Engine,
        theta: NestedMap,
        searches: Callable[[Kind], SearchInSteps],
        text: str = "",
    ):
        super().__init__(engine, theta)
        self._searches, self._text = searches, text
        self._built: dict[tuple, tuple[SearchInSteps, Compiled, Compiled]] = {}

    @property
    def programs(self) -> int:
        return 2 * len(self._built)

    def Run(self, kind: Kind, inputs: NestedMap) -> NestedMap:
        """Searches for the results of rows, on all processes of the job.

        Args:
            inputs: of SearchInSteps, as NumPy arrays, of the same shapes for all searches of a kind; and `max_lengths`,
                int32 [B], the most tokens of each row's results, EOS included, 0 to skip the row.

        Returns:
            FlatBeamSearch.Results, and more: see `block_program`, as NumPy arrays.
        """
        *_, report = self.Blocks(kind, inputs)
        return report

    def Blocks(self, kind: Kind, inputs: NestedMap) -> Iterator[NestedMap]:
        """Searches as Run does, and yields after each block a report of what ended by then: see `block_program`.

        The host looks at a block's results while the devices run the next. Where others follow, a search goes on to its
        end although nobody wants its results any more, since the processes of a job run the same blocks.
        """
        self.Tell(kind, inputs)
        search, begin, block = self._Built(kind, inputs)
        rows = NestedMap({name: x for name, x in inputs.items() if name != "max_lengths"})
        state, cache = begin(self.theta, rows, inputs.max_lengths)
        state, cache, report = block(state, cache, self.theta)
        wanted, left = True, math.ceil(search.search.T / BLOCK) - 1
        while True:
            newest = report
            if left:
                state, cache, report = block(state, cache, self.theta)
            newest, left = self.engine.Get(newest), left - 1
            try:
                if wanted:
                    yield newest
            except GeneratorExit:
                if not self.leads:
                    raise
                wanted = False
            if newest.over or left < 0:
                return

    def _Built(self, kind: Kind, inputs: NestedMap) -> tuple[SearchInSteps, Compiled, Compiled]:
        key = (kind, *((path, x.shape) for path, x in inputs.FlattenItems()))
        if key not in self._built:
            search = self._searches(kind)
            specs = inputs.Transform(lambda x: TensorSpec(x.shape, x.dtype.name))
            del specs["max_lengths"]
            text = f"{self._text}\n{kind}" if self._text else ""
            begin, step = decoding_programs("search_begin", search, specs, text)
            block = block_program(step, search.search, BLOCK)
            self._built[key] = search, self.engine.BuildStep(begin), self.engine.BuildStep(block)
        return self._built[key]
