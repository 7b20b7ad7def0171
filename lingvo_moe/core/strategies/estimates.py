"""Estimates the seconds and the memory of a training step under a candidate, without compiling anything.

Products count at the machine's peak, or as their traffic if that takes longer; collectives as in planner/network.py.
What XLA makes of a program is unknown here, so these figures only order candidates. Figures of compiled programs
correct them: see Correction.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lingvo_moe.core.pipeline.schedule import STAGE
from lingvo_moe.core.planner import network
from lingvo_moe.core.planner.gpu_cluster import Cluster
from lingvo_moe.core.planner.machine import Machine
from lingvo_moe.core.sharding import DimsMapping, Mesh, dims_mapping
from lingvo_moe.core.sharding.letters import WEIGHTS, axes_of
from lingvo_moe.core.strategies.candidate import DOTS, FULL, MOVED, Candidate
from lingvo_moe.core.strategies.host import Host
from lingvo_moe.core.strategies.layout import Layout
from lingvo_moe.core.strategies.state_bytes import Held, StateBytes
from lingvo_moe.core.strategies.workload import Operand, Product, Workload

# How often a step touches an activation of a layer's width outside of products: norms, residual branches, dropout.
_PASSES = 12
# Bytes of scratch, beside its activations, that a block's backward pass has for each byte of them.
_LIVE = 2.0


@dataclass
class Correction:
    """By what figures of compiled programs differ from estimates.

    Attributes:
        work: of the seconds of each part's products.
        rest: of the seconds of all else on the devices.
        network: of the seconds of collectives.
        memory: of the bytes of activations and temporaries.
    """

    work: dict[str, float] = field(default_factory=dict)
    rest: float = 1.0
    network: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """What a candidate should need.

    Attributes:
        work: seconds of products, by part.
        rest: seconds of all else on the devices.
        network: seconds of collectives.
        state: bytes of weights, gradients and slots.
        least: bytes that the program cannot do without.
        activations: bytes of what is kept for the backward pass, and of temporaries.
        idle: by how much a pipeline's idle time lengthens the work of its stages.
    """

    work: Mapping[str, float]
    rest: float
    network: float
    state: int
    least: int
    activations: float
    idle: float = 1.0

    def Seconds(self, by: Correction) -> float:
        """The time of a step."""
        work = sum(seconds * by.work.get(part, 1.0) for part, seconds in self.work.items())
        return self.idle * (work + by.rest * self.rest) + by.network * self.network

    def Bytes(self, by: Correction) -> float:
        """That one device needs."""
        return self.state + by.memory * self.activations


@dataclass
class _Sums:
    """The forward pass of a layout: seconds and bytes of one device, by what happens to them with each `remat`."""

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
class _Here:
    """A product on one device under a layout.

    Attributes:
        times: how often a device computes it in the forward pass.
        seconds: of all these.
        tensors: the operands and the result, with their bytes on a device.
        parts_of: the mesh axes along which it is divided, by letter.
    """

    product: Product
    layout: Layout
    times: float
    seconds: float
    tensors: tuple[tuple[Operand, float], ...]
    parts_of: Mapping[str, tuple[str, ...]]


class Estimator:
    """Estimates candidates of one experiment on one machine.

    Args:
        work: of the experiment's step.
        states: counts the state, by the type of activations.
        machine: the machine.
        itemsizes: bytes of an element of activations, by their type.
    """

    def __init__(
        self,
        work: Workload,
        states: Mapping[str, StateBytes],
        machine: Machine | Host,
        itemsizes: Mapping[str, int],
    ):
        self._work, self._states, self._machine = work, states, machine
        self._itemsizes = itemsizes
        self._sums: dict[tuple[Layout, str], _Sums] = {}
        self._held: dict[tuple[Layout, str, str], Held] = {}
        self._seconds: dict[tuple[str, int, tuple[str, ...], Mesh], float] = {}

    def Of(self, candidate: Candidate) -> Estimate:
        """The estimate of a candidate, uncorrected."""
        layout, dtype = candidate.layout, candidate.fprop_dtype
        key = (layout, dtype)
        if key not in self._sums:
            self._sums[key] = self._Forward(layout, self._itemsizes[dtype])
        state = (layout, dtype, candidate.shard_state)
        if state not in self._held:
            self._held[state] = self._states[dtype].On(layout, candidate.shard_state)
        return self._Combined(candidate, self._sums[key], self._held[state])

    def _Combined(self, candidate: Candidate, sums: _Sums, held: Held) -> Estimate:
        stages = candidate.layout.stages
        again = self._Recomputed(candidate.remat, sums)
        work = {part: 3 * seconds + again.get(part, 0.0) for part, seconds in sums.work.items()}
        moves = sums.sent + sums.returned
        repeated = {
            FULL: sums.sums + moves,
            MOVED: sums.sums,
            DOTS: sums.sent,
        }[candidate.remat]
        collectives = sums.sums + 2 * moves + repeated + sums.backward_sums
        collectives += self._OfState(candidate, held)
        kept = sums.boundaries + {FULL: 0.0, MOVED: sums.moved, DOTS: sums.dots}[candidate.remat]
        idle, parts = 1.0, candidate.micro_batches
        if stages > 1:
            # A stage's loop over blocks computes them once more in the backward pass, and shorter stages wait.
            work = {part: work[part] + seconds for part, seconds in sums.work.items()}
            blocks = self._work.blocks.values()
            padded = max(stages * -(-n // stages) / n for n in blocks)
            idle = padded * (parts + stages - 1) / parts
            in_flight = min(parts, 2 * stages - 1)
            kept = (
                sums.boundaries / len(self._work.blocks) / parts * in_flight + kept / stages / parts
            )
        else:
            kept /= parts
        bandwidth = self._machine.hbm_bandwidth
        rest = (_PASSES * sums.boundaries + 3 * held.total) / bandwidth
        whole = self._Gathered(candidate, held)
        if stages == 1 and parts > 1:
            # The sum of gradients beside those of a micro-batch. XLA casts weights before the loop over these, all at
            # once and in several layouts: 1.5 times their bytes in a plan of MoE(2048E, 36L) for v5p:4x4x4.
            narrow = self._itemsizes[candidate.fprop_dtype] == 2
            kept += held.gradients + (1.5 * held.weights if narrow else 0)
        least = held.weights + held.slots + whole
        least += 0 if stages > 1 or parts > 1 else int(sums.boundaries)
        return Estimate(
            work,
            rest,
            collectives,
            held.total,
            least,
            whole + kept + _LIVE * sums.block / parts,
            idle,
        )

    def _Recomputed(self, remat: str, sums: _Sums) -> dict[str, float]:
        if remat == FULL:
            return dict(sums.work)
        less = sums.of_weights if remat == DOTS else sums.of_moves
        return {part: seconds - less.get(part, 0.0) for part, seconds in sums.work.items()}

    def _Gathered(self, candidate: Candidate, held: Held) -> int:
        """Bytes of the sharded weights that are whole at a time: those of a stage, else those of a block."""
        if candidate.shard_state != WEIGHTS:
            return 0
        blocks = sum(self._work.blocks.values())
        return held.gathered if candidate.layout.stages > 1 else held.gathered // max(blocks, 1)

    def _OfState(self, candidate: Candidate, held: Held) -> float:
        """Seconds to sum gradients and to gather weights."""
        layout, level = candidate.layout, candidate.shard_state
        total = sum(
            self._Collective("all-reduce", size, axes, layout) for axes, size in held.synced.items()
        )
        times = candidate.micro_batches if layout.stages == 1 else 1
        gathers = {"none": 0, "slots": 1, "gradients": 1, "weights": 2 * times}[level]
        copies = tuple(a for a in layout.mesh.axis_names if a != STAGE)
        return total * times + gathers * self._Collective(
            "all-gather", held.gathered, copies, layout
        )

    def _Forward(self, layout: Layout, itemsize: int) -> _Sums:
        sums = _Sums()
        for product, count in self._work.products.items():
            self._Add(sums, product, count, layout, itemsize)
        for elements in self._work.boundaries.values():
            sums.boundaries += elements * itemsize / layout.rows
        blocks = sum(self._work.blocks.values()) / max(len(self._work.blocks), 1)
        sums.block = sums.dots / max(sum(self._work.blocks.values()), 1) + sums.boundaries / max(
            len(self._work.blocks), 1
        )
        sums.boundaries *= blocks
        return sums

    def _Add(
        self, sums: _Sums, product: Product, count: int, layout: Layout, itemsize: int
    ) -> None:
        """Adds `count` executions of a product."""
        mesh, parts_of = layout.mesh, _axes_of_letters(product, layout)
        local = {
            n: size / mesh.axis_size(parts_of[n]) if n in parts_of else size
            for n, size in product.sizes
        }
        tensors = (*product.operands, product.result)
        sizes = [itemsize * math.prod(local[n] for n in x.letters) for x in tensors]
        parts = mesh.axis_size([a for axes in parts_of.values() for a in axes])
        times = count / layout.stages if product.stack else count
        peaks = self._machine.peaks
        peak = peaks["bfloat16"] if itemsize == 2 else peaks.get("tf32", peaks["bfloat16"])
        traffic = sum(sizes) / self._machine.hbm_bandwidth
        here = _Here(
            product,
            layout,
            times,
            times * max(product.flops / parts / peak, traffic),
            tuple(zip(tensors, sizes, strict=True)),
            parts_of,
        )
        sums.work[product.part] += here.seconds
        if product.of_weight:
            sums.of_weights[product.part] += here.seconds
            if product.stack:
                sums.dots += times * sizes[2]
        self._AddSums(sums, here)
        self._AddMoves(sums, here)

    def _AddSums(self, sums: _Sums, here: _Here) -> None:
        """Adds the all-reduces of partial sums: of the result, and of the gradient of an activation."""
        product, parts_of = here.product, here.parts_of
        inside = product.result.letters
        over = [a for n, axes in parts_of.items() if n not in inside for a in axes]
        (_, size) = here.tensors[2]
        sums.sums += here.times * self._Collective("all-reduce", size, over, here.layout)
        if product.lookup or not product.of_weight:
            return
        for operand, size in here.tensors[:2]:
            if not operand.weight:
                own = operand.letters
                over = [
                    a for n, axes in parts_of.items() if n in inside and n not in own for a in axes
                ]
                one = self._Collective("all-reduce", size, over, here.layout)
                sums.backward_sums += here.times * one / product.readers

    def _AddMoves(self, sums: _Sums, here: _Here) -> None:
        """Adds the all-to-alls of tokens to their experts and back."""
        product = here.product
        if product.part == "dispatch_combine" and product.result.letters.startswith("GE"):
            sums.of_moves[product.part] += here.seconds
        if product.part != "experts":
            return
        for tensor, size in here.tensors:
            if tensor.weight or "M" not in tensor.letters:
                continue
            one = here.times * self._Collective(
                "all-to-all", size, here.layout.Axes("E"), here.layout
            )
            sums.moved += here.times * size
            if tensor is product.result:
                sums.returned += one
                sums.of_moves[product.part] += here.seconds
            else:
                sums.sent += one

    def _Collective(self, kind: str, size: float, axes: Sequence[str], layout: Layout) -> float:
        """Seconds of a collective among the devices along some axes."""
        mesh = layout.mesh
        axes = tuple(a for a in mesh.axis_names if a in axes)
        participants = mesh.axis_size(axes)
        if participants == 1 or size <= 0:
            return 0.0
        key = (kind, int(size), axes, mesh)
        if key not in self._seconds:
            if isinstance(self._machine, Host):
                return self._machine.Collective(kind, size)
            lies = None
            if isinstance(self._machine, Cluster) or self._machine.slices > 1:
                lies = network.spread((_first_group(mesh, axes),), self._machine)
            self._seconds[key] = network.seconds(kind, int(size), participants, self._machine, lies)
        return self._seconds[key]


def _axes_of_letters(product: Product, layout: Layout) -> dict[str, tuple[str, ...]]:
    """The mesh axes along which a product is divided, by letter; those of activations come first."""
    used: set[str] = set()
    found: dict[str, tuple[str, ...]] = {}
    order = sorted(product.operands, key=lambda operand: operand.weight)
    for operand in (*order, product.result):
        for letter, axis in zip(operand.letters, _mapping(operand, layout), strict=True):
            axes = tuple(a for a in axes_of(axis) if a not in used)
            if axes and letter not in found:
                found[letter] = axes
                used.update(axes)
    return found


def _mapping(operand: Operand, layout: Layout) -> DimsMapping:
    split = layout.weights if operand.weight else layout.activations
    return dims_mapping(operand.letters, dict(split))


def _first_group(mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """The ids of the devices that are with device 0 along some axes."""
    index = tuple(slice(None) if a in axes else 0 for a in mesh.axis_names)
    return tuple(int(i) for i in mesh.device_array()[index].flatten())
