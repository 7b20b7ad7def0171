"""The forward pass of a training step under a layout: seconds and bytes of one device.

Products count at the machine's peak, or as their traffic if that takes longer; collectives as in planner/network/.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lingvo_moe.analysis.plans.network.mesh_machine import MeshMachine
from lingvo_moe.analysis.programs.hlo.parts import EXPERTS
from lingvo_moe.analysis.search.strategies.mesh_layout import MeshLayout
from lingvo_moe.analysis.search.strategies.workload import (
    DISPATCHED,
    RETURNED,
    Operand,
    Product,
    Workload,
)
from lingvo_moe.core.layers.kept import names_of
from lingvo_moe.core.sharding import dims_mapping
from lingvo_moe.core.sharding.letters import axes_of
from lingvo_moe.core.tensors import Kept


@dataclass
class Saved:
    """The work that the backward pass need not repeat if a loop over blocks keeps the activations of a name."""

    # Of products, by part.
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    network: float = 0.0  # seconds of collectives
    bytes: float = 0.0  # the size of these activations


@dataclass
class ForwardWork:
    """The work of one device in a forward pass, and the activations that it can keep."""

    # Seconds of products, by part.
    work: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Of these, the seconds of products in blocks, by part.
    of_blocks: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Seconds of collectives: all-reduces of partial results, and all-to-alls to the experts and back.
    network: float = 0.0
    network_of_blocks: float = 0.0  # the seconds of these in blocks
    moves: float = 0.0  # the seconds of these in all-to-alls
    backward_sums: float = 0.0  # seconds of the all-reduces of gradients of activations
    boundaries: float = 0.0  # bytes of the inputs of all blocks
    results: float = 0.0  # bytes of what all blocks' products with weights give
    block: float = 0.0  # bytes of the activations of one block
    names: Mapping[str, Kept] = field(default_factory=dict)  # see Workload
    # What is saved by keeping one of them.
    saved: dict[str, Saved] = field(default_factory=lambda: defaultdict(Saved))

    def SavedBy(self, remat: str | Sequence[str]) -> list[Saved]:
        """The work that is saved by what a value of task.remat keeps."""
        return [self.saved[name] for name in names_of(remat, self.names) if name in self.saved]


@dataclass(frozen=True)
class _Local:
    """A product on one device."""

    product: Product  # the product
    times: float  # how often a device computes it
    seconds: float  # the seconds of all these
    # The operands and the result, with their bytes on a device.
    tensors: tuple[tuple[Operand, float], ...]
    axes: Mapping[str, tuple[str, ...]]  # the mesh axes along which it is divided, by letter

    def AxesWithout(self, letters: str, among: str = "") -> list[str]:
        """The mesh axes that divide dimensions of letters not in `letters`, and in `among` unless that is ''."""
        return [
            a
            for n, axes in self.axes.items()
            if n not in letters and (not among or n in among)
            for a in axes
        ]


def forward(work: Workload, layout: MeshLayout, itemsize: int, on: MeshMachine) -> ForwardWork:
    """The forward pass of a step's work.

    Args:
        itemsize: bytes of an element of activations.
    """
    reader = _ForwardReader(layout, itemsize, on)
    for product, count in work.products.items():
        reader.Add(product, count)
    total = reader.total
    total.names = work.names
    inputs = sum(elements * work.blocks[stack] for stack, elements in work.boundaries.items())
    total.boundaries = inputs * itemsize / layout.rows
    total.block = (total.results + total.boundaries) / sum(work.blocks.values())
    return total


class _ForwardReader:
    """Adds up the forward pass, product by product."""

    def __init__(self, layout: MeshLayout, itemsize: int, on: MeshMachine):
        self._layout, self._itemsize, self._on = layout, itemsize, on
        self.total = ForwardWork()

    def Add(self, product: Product, count: int) -> None:
        """Adds `count` executions of a product, and its collectives."""
        here, total = self._OnDevice(product, count), self.total
        total.work[product.part] += here.seconds
        if product.stack:
            total.of_blocks[product.part] += here.seconds
            if product.of_weight:
                total.results += here.times * here.tensors[2][1]
        summed = self._AddSums(here)
        if product.name:
            saved = total.saved[product.name]
            saved.seconds[product.part] += here.seconds
            saved.network += summed
            if product.name != DISPATCHED:
                saved.bytes += here.times * here.tensors[2][1]
        if product.part == EXPERTS:
            self._AddMoves(here)

    def _OnDevice(self, product: Product, count: int) -> _Local:
        layout, mesh = self._layout, self._layout.mesh
        axes = _axes_of_letters(product, layout)
        sizes = {n: s / mesh.axis_size(axes[n]) if n in axes else s for n, s in product.sizes}
        tensors = (*product.operands, product.result)
        sizes_here = [self._itemsize * math.prod(sizes[n] for n in x.letters) for x in tensors]
        parts = mesh.axis_size([a for some in axes.values() for a in some])
        times = count / layout.stages if product.stack else count
        seconds = times * self._on.Computing(product.flops / parts, sum(sizes_here), self._itemsize)
        return _Local(product, times, seconds, tuple(zip(tensors, sizes_here, strict=True)), axes)

    def _AddSums(self, here: _Local) -> float:
        """Adds the all-reduces of partial results and of activations' gradients; returns the seconds of the former."""
        product, inside, total = here.product, here.product.result.letters, self.total
        over, size = here.AxesWithout(inside), here.tensors[2][1]
        seconds = here.times * self._on.Seconds("all-reduce", size, over)
        total.network += seconds
        if product.stack:
            total.network_of_blocks += seconds
        if product.of_weight and not product.lookup:
            for operand, size in here.tensors[:2]:
                if not operand.weight:
                    over = here.AxesWithout(operand.letters, among=inside)
                    one = self._on.Seconds("all-reduce", size, over)
                    total.backward_sums += here.times * one / product.readers
        return seconds

    def _AddMoves(self, here: _Local) -> None:
        """Adds the all-to-alls of a product of the experts: of tokens to them, or back."""
        total = self.total
        for tensor, size in here.tensors:
            if tensor.weight or "M" not in tensor.letters:
                continue
            seconds = here.times * self._on.Seconds("all-to-all", size, self._layout.Axes("E"))
            total.network += seconds
            total.network_of_blocks += seconds
            total.moves += seconds
            saved = total.saved[RETURNED if tensor is here.product.result else DISPATCHED]
            saved.network += seconds
            if tensor is not here.product.result:
                saved.bytes += here.times * size


def _axes_of_letters(product: Product, layout: MeshLayout) -> dict[str, tuple[str, ...]]:
    """The mesh axes along which a product is divided, by letter; those of activations come first."""
    used: set[str] = set()
    axes_of_letter: dict[str, tuple[str, ...]] = {}
    order = sorted(product.operands, key=lambda operand: operand.weight)
    for operand in (*order, product.result):
        split = layout.weights if operand.weight else layout.activations
        mapping = dims_mapping(operand.letters, dict(split))
        for letter, axis in zip(operand.letters, mapping, strict=True):
            axes = tuple(a for a in axes_of(axis) if a not in used)
            if axes and letter not in axes_of_letter:
                axes_of_letter[letter] = axes
                used.update(axes)
    return axes_of_letter
