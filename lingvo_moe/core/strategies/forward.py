"""The forward pass of a training step under a layout: seconds and bytes of one device.

Products count at the machine's peak, or as their traffic if that takes longer; collectives as in planner/network.py.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from lingvo_moe.core.planner.machine import Machine
from lingvo_moe.core.planner.mesh_network import seconds_along
from lingvo_moe.core.planner.ring import VIRTUAL_CPU
from lingvo_moe.core.sharding import dims_mapping
from lingvo_moe.core.sharding.letters import axes_of
from lingvo_moe.core.strategies.host import Host
from lingvo_moe.core.strategies.layout import Layout
from lingvo_moe.core.strategies.workload import Operand, Product, Workload


@dataclass
class Forward:
    """What one device does and keeps in a forward pass.

    Attributes:
        work: seconds of products, by part.
        of_weights: of these, seconds of products with weights, by part.
        of_moves: of these, seconds of what makes the tensors that all-to-alls move, by part.
        sums: seconds of the all-reduces of results.
        sent, returned: seconds of the all-to-alls to the experts, and back.
        backward_sums: seconds of the all-reduces of gradients of activations.
        boundaries: bytes of the inputs of all blocks.
        dots: bytes of what all blocks' products with weights give.
        moved: bytes of what all-to-alls move.
        block: bytes of the activations of one block.
    """

    work: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    of_weights: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    of_moves: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sums: float = 0.0
    sent: float = 0.0
    returned: float = 0.0
    backward_sums: float = 0.0
    boundaries: float = 0.0
    dots: float = 0.0
    moved: float = 0.0
    block: float = 0.0


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
    found.block = found.dots / max(blocks, 1) + found.boundaries / stacks
    found.boundaries *= blocks / stacks
    return found


def collective_seconds(
    kind: str,
    size: float,
    axes: tuple[str, ...] | list[str],
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
    """Adds `count` executions of a product."""
    here = _local(product, count, layout, itemsize, machine)
    found.work[product.part] += here.seconds
    if product.of_weight:
        found.of_weights[product.part] += here.seconds
        if product.stack:
            found.dots += here.times * here.tensors[2][1]
    _add_sums(found, here, layout, machine)
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


def _add_sums(found: Forward, here: _Local, layout: Layout, machine: Machine | Host) -> None:
    """Adds the all-reduces of partial sums: of the result, and of the gradient of an activation."""
    product, inside = here.product, here.product.result.letters
    over = here.AxesWithout(inside)
    found.sums += here.times * collective_seconds(
        "all-reduce", here.tensors[2][1], over, layout, machine
    )
    if product.lookup or not product.of_weight:
        return
    for operand, size in here.tensors[:2]:
        if not operand.weight:
            over = here.AxesWithout(operand.letters, among=inside)
            one = collective_seconds("all-reduce", size, over, layout, machine)
            found.backward_sums += here.times * one / product.readers


def _add_moves(found: Forward, here: _Local, layout: Layout, machine: Machine | Host) -> None:
    """Adds the all-to-alls of tokens to their experts and back."""
    product = here.product
    if product.part == "dispatch_combine" and product.result.letters.startswith("GE"):
        found.of_moves[product.part] += here.seconds
    if product.part != "experts":
        return
    for tensor, size in here.tensors:
        if tensor.weight or "M" not in tensor.letters:
            continue
        one = here.times * collective_seconds("all-to-all", size, layout.Axes("E"), layout, machine)
        found.moved += here.times * size
        if tensor is product.result:
            found.returned += one
            found.of_moves[product.part] += here.seconds
        else:
            found.sent += one


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
