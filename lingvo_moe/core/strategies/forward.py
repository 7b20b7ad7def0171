"""The forward pass of a training step under a layout: seconds and bytes of one device.

Products count at the machine's peak, or as their traffic if that takes longer; collectives as in planner/network/.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lingvo_moe.core.planner.machines.machine import Machine
from lingvo_moe.core.planner.machines.ring import VIRTUAL_CPU
from lingvo_moe.core.planner.network.mesh_network import seconds_along
from lingvo_moe.core.sharding import dims_mapping
from lingvo_moe.core.sharding.letters import axes_of
from lingvo_moe.core.strategies.host import Host
from lingvo_moe.core.strategies.layout import Layout
from lingvo_moe.core.strategies.workload import (
    DISPATCHED,
    RETURNED,
    Operand,
    Product,
    Workload,
)


@dataclass
class Saved:
    """The work that the backward pass need not repeat if a loop over blocks keeps the activations of a name.

    Attributes:
        seconds: of products, by part.
        network: seconds of collectives.
        bytes: of these activations.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    network: float = 0.0
    bytes: float = 0.0


@dataclass
class Forward:
    """The work of one device in a forward pass, and the activations that it can keep.

    Attributes:
        work: seconds of products, by part.
        of_blocks: of these, the seconds of products in blocks, by part.
        network: seconds of collectives: all-reduces of partial results, and all-to-alls to the experts and back.
        network_of_blocks: of these, the seconds in blocks.
        moves: of these, the seconds of all-to-alls.
        backward_sums: seconds of the all-reduces of gradients of activations.
        boundaries: bytes of the inputs of all blocks.
        results: bytes of what all blocks' products with weights give.
        block: bytes of the activations of one block.
        saved: what is saved by keeping a name of layers/kept.py.
    """

    work: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    of_blocks: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    network: float = 0.0
    network_of_blocks: float = 0.0
    moves: float = 0.0
    backward_sums: float = 0.0
    boundaries: float = 0.0
    results: float = 0.0
    block: float = 0.0
    saved: dict[str, Saved] = field(default_factory=lambda: defaultdict(Saved))

    def SavedBy(self, names: Sequence[str]) -> list[Saved]:
        """The work that is saved by keeping these names."""
        return [self.saved[name] for name in names if name in self.saved]


@dataclass(frozen=True)
class _Local:
    """A product on one device.

    Attributes:
        product: the product.
        times: how often a device computes it.
        seconds: of all these.
        tensors: the operands and the result, with their bytes on a device.
        axes: the mesh axes along which it is divided, by letter.
    """

    product: Product
    times: float
    seconds: float
    tensors: tuple[tuple[Operand, float], ...]
    axes: Mapping[str, tuple[str, ...]]

    def AxesWithout(self, letters: str, among: str = "") -> list[str]:
        """The mesh axes along which it is divided by other letters than these; `among`: only by these letters."""
        return [
            a
            for n, axes in self.axes.items()
            if n not in letters and (not among or n in among)
            for a in axes
        ]


def forward(work: Workload, layout: Layout, itemsize: int, machine: Machine | Host) -> Forward:
    """The forward pass of a step's work under a layout, with activations of so many bytes an element."""
    found = Forward()
    for product, count in work.products.items():
        _add(found, product, count, layout, itemsize, machine)
    for elements in work.boundaries.values():
        found.boundaries += elements * itemsize / layout.rows
    stacks, blocks = max(len(work.blocks), 1), sum(work.blocks.values())
    found.block = found.results / max(blocks, 1) + found.boundaries / stacks
    found.boundaries *= blocks / stacks
    return found


def collective_seconds(
    kind: str,
    size: float,
    axes: Sequence[str],
    layout: Layout,
    machine: Machine | Host,
) -> float:
    """Seconds of a collective of so many bytes on a device among the devices along some axes of a layout's mesh."""
    mesh = layout.mesh
    along = tuple(a for a in mesh.axis_names if a in axes)
    network = VIRTUAL_CPU if isinstance(machine, Host) else machine
    return seconds_along(kind, size, along, mesh, network)


def _add(
    found: Forward,
    product: Product,
    count: int,
    layout: Layout,
    itemsize: int,
    machine: Machine | Host,
) -> None:
    """Adds `count` executions of a product, and its collectives."""
    here = _local(product, count, layout, itemsize, machine)
    found.work[product.part] += here.seconds
    if product.stack:
        found.of_blocks[product.part] += here.seconds
        if product.of_weight:
            found.results += here.times * here.tensors[2][1]
    summed = _add_sums(found, here, layout, machine)
    if product.name:
        saved = found.saved[product.name]
        saved.seconds[product.part] += here.seconds
        saved.network += summed
        if product.name != DISPATCHED:
            saved.bytes += here.times * here.tensors[2][1]
    if product.part == "experts":
        _add_moves(found, here, layout, machine)


def _local(
    product: Product, count: int, layout: Layout, itemsize: int, machine: Machine | Host
) -> _Local:
    mesh, axes = layout.mesh, _axes_of_letters(product, layout)
    sizes = {n: s / mesh.axis_size(axes[n]) if n in axes else s for n, s in product.sizes}
    tensors = (*product.operands, product.result)
    held = [itemsize * math.prod(sizes[n] for n in x.letters) for x in tensors]
    parts = mesh.axis_size([a for each in axes.values() for a in each])
    times = count / layout.stages if product.stack else count
    peaks = machine.peaks
    peak = peaks["bfloat16"] if itemsize == 2 else peaks.get("tf32", peaks["bfloat16"])
    seconds = times * max(product.flops / parts / peak, sum(held) / machine.hbm_bandwidth)
    return _Local(product, times, seconds, tuple(zip(tensors, held, strict=True)), axes)


def _add_sums(found: Forward, here: _Local, layout: Layout, machine: Machine | Host) -> float:
    """Adds the all-reduces of partial results and of activations' gradients; returns the seconds of the former."""
    product, inside = here.product, here.product.result.letters
    over = here.AxesWithout(inside)
    size = here.tensors[2][1]
    seconds = here.times * collective_seconds("all-reduce", size, over, layout, machine)
    found.network += seconds
    if product.stack:
        found.network_of_blocks += seconds
    if product.of_weight and not product.lookup:
        for operand, size in here.tensors[:2]:
            if not operand.weight:
                over = here.AxesWithout(operand.letters, among=inside)
                one = collective_seconds("all-reduce", size, over, layout, machine)
                found.backward_sums += here.times * one / product.readers
    return seconds


def _add_moves(found: Forward, here: _Local, layout: Layout, machine: Machine | Host) -> None:
    """Adds the all-to-alls of a product of the experts: of tokens to them, or back."""
    for tensor, size in here.tensors:
        if tensor.weight or "M" not in tensor.letters:
            continue
        one = collective_seconds("all-to-all", size, layout.Axes("E"), layout, machine)
        seconds = here.times * one
        found.network += seconds
        found.network_of_blocks += seconds
        found.moves += seconds
        saved = found.saved[RETURNED if tensor is here.product.result else DISPATCHED]
        saved.network += seconds
        if tensor is not here.product.result:
            saved.bytes += here.times * size


def _axes_of_letters(product: Product, layout: Layout) -> dict[str, tuple[str, ...]]:
    """The mesh axes along which a product is divided, by letter; those of activations come first."""
    used: set[str] = set()
    found: dict[str, tuple[str, ...]] = {}
    order = sorted(product.operands, key=lambda operand: operand.weight)
    for operand in (*order, product.result):
        split = layout.weights if operand.weight else layout.activations
        mapping = dims_mapping(operand.letters, dict(split))
        for letter, axis in zip(operand.letters, mapping, strict=True):
            axes = tuple(a for a in axes_of(axis) if a not in used)
            if axes and letter not in found:
                found[letter] = axes
                used.update(axes)
    return found
