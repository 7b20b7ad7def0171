"""The layout of a model on the devices of a machine: a mesh, and the mesh axes of the letters of its tensors.

A layout has at most four axes, of which the last lies closest together:

* stage: stages of a pipeline;
* data: rows of the batch and groups of tokens;
* expert: these too, and experts;
* model: some of heads, hidden units and vocabulary.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lingvo_moe.analysis.search.strategies.workload import Workload
from lingvo_moe.core.pipeline.schedule import DATA, STAGE
from lingvo_moe.core.sharding import Axis, Mesh
from lingvo_moe.core.sharding.letters import axes_of

EXPERT, MODEL = "expert", "model"
_ROWS = "BG"
# What axis `model` may shard: heads (with those of keys and values), hidden units, vocabulary.
_MODEL_LETTERS = ("NA", "H", "V")
# More stages than this only lengthen the search: a pipeline's idle time grows with them.
_MOST_STAGES = 16


@dataclass(frozen=True)
class MeshLayout:
    """A mesh and the axes of letters."""

    mesh: Mesh  # the mesh of all devices
    activations: tuple[tuple[str, Axis], ...]  # (letter, axis or axes) of activations
    weights: tuple[tuple[str, Axis], ...]  # the same of weights

    @property
    def stages(self) -> int:
        """Stages of a pipeline; 1 without one."""
        return self.size(STAGE)

    @property
    def rows(self) -> int:
        """The number of devices that have different rows of the batch."""
        return self.mesh.axis_size(self.Axes("B"))

    def Axes(self, letter: str) -> tuple[str, ...]:
        """The mesh axes of a letter of activations."""
        return tuple(a for a in axes_of(dict(self.activations).get(letter)) if self.size(a) > 1)

    def size(self, axis: str) -> int:
        """The size of an axis; 1 of one that the mesh lacks."""
        return self.mesh.axis_size(axis) if axis in self.mesh.axis_names else 1


def layouts(work: Workload, num_devices: int) -> Iterator[MeshLayout]:
    """All layouts over so many devices that the sizes of a model divide over, in a fixed order."""
    sizes = letter_sizes(work)
    most_stages = min(*work.blocks.values(), _MOST_STAGES) if work.stages and work.blocks else 1
    groups = [letters for letters in _MODEL_LETTERS if letters[0] in sizes]
    for stages in divisors(num_devices):
        if stages > most_stages:
            break
        rest = num_devices // stages
        for model in divisors(rest):
            for chosen in _chosen(groups, sizes, model):
                for expert in divisors(rest // model):
                    rows = rest // model
                    fits = divides(rows, sizes, _ROWS) and divides(expert, sizes, "E")
                    if fits and ("E" in sizes or expert == 1):
                        yield layout_of(
                            {STAGE: stages, DATA: rows // expert, EXPERT: expert, MODEL: model},
                            chosen,
                            "E" in sizes,
                        )


def letter_sizes(work: Workload) -> dict[str, set[int]]:
    """The sizes that the dimensions of a letter have."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for product in work.products:
        for letter, size in product.sizes:
            sizes[letter].add(size)
    return dict(sizes)


def layout_of(sizes: Mapping[str, int], inside: str, experts: bool) -> MeshLayout:
    """The layout with axes of these sizes, those of size 1 left out, and these letters on axis `model`.

    Args:
        experts: whether the model has some.
    """
    names = [name for name, size in sizes.items() if size > 1] or [EXPERT if experts else DATA]
    mesh = Mesh(tuple(names), tuple(sizes[name] for name in names))
    rows = tuple(name for name in (DATA, EXPERT) if name in names)
    model: dict[str, Axis] = dict.fromkeys(inside, MODEL)
    with_experts: dict[str, Axis] = {"E": EXPERT} if EXPERT in names and experts else {}
    row_axis: Axis = rows[0] if len(rows) == 1 else rows or None
    row_letters = _ROWS if experts else "B"
    of_rows: dict[str, Axis] = dict.fromkeys(row_letters, row_axis) if rows else {}
    return MeshLayout(
        mesh,
        tuple({**of_rows, **with_experts, **model}.items()),
        tuple({**with_experts, **model}.items()),
    )


def _chosen(groups: Sequence[str], sizes: Mapping[str, set[int]], model: int) -> Iterator[str]:
    """The letters that an axis of so many devices may shard: '' for one device, never for more."""
    if model == 1:
        yield ""
        return
    fit = [letters for letters in groups if divides(model, sizes, letters)]
    for count in range(1, len(fit) + 1):
        for several in itertools.combinations(fit, count):
            yield "".join(n for letters in several for n in letters if n in sizes)


def divides(parts: int, sizes: Mapping[str, set[int]], letters: str) -> bool:
    """Whether `parts` divides all sizes of these letters."""
    return all(size % parts == 0 for n in letters for size in sizes.get(n, ()))


def divisors(n: int) -> list[int]:
    """All divisors of a number, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
