"""Estimates the seconds and the memory of a training step under a candidate, without compiling anything.

What XLA makes of a program is unknown here, so these figures only order candidates. Figures of compiled programs
correct them: see Correction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lingvo_moe.analysis.plans.machines.base_machine import Machine
from lingvo_moe.analysis.plans.machines.pace import AS_RATED, Pace
from lingvo_moe.analysis.plans.memory.step_bytes import BESIDE, StateSize
from lingvo_moe.analysis.plans.network.mesh_machine import MeshMachine
from lingvo_moe.analysis.search.strategies.candidate import Candidate
from lingvo_moe.analysis.search.strategies.forward import ForwardWork, forward
from lingvo_moe.analysis.search.strategies.mesh_layout import MeshLayout
from lingvo_moe.analysis.search.strategies.state_bytes import StateBytes
from lingvo_moe.analysis.search.strategies.workload import Workload
from lingvo_moe.core.layers.softmax import Softmax
from lingvo_moe.core.pipeline.schedule import STAGE
from lingvo_moe.core.sharding.letters import GRADIENTS, NONE, SLOTS, WEIGHTS
from lingvo_moe.core.state.offload import ACTIVATIONS

# How often a step touches an activation of a layer's width outside of products: norms, residual branches, dropout.
_PASSES = 12


@dataclass
class Correction:
    """The factors by which figures of compiled programs differ from estimates."""

    # Factors: of the seconds of each part's products, of all else on the devices, of collectives; of the bytes of
    # activations and temporaries; of the seconds of moves from and to the hosts.
    work: dict[str, float] = field(default_factory=dict)
    rest: float = 1.0
    network: float = 1.0
    memory: float = 1.0
    waiting: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """The seconds and bytes that a candidate should need."""

    work: Mapping[str, float]  # seconds of products, by part
    rest: float  # seconds of all else on the devices
    network: float  # seconds of collectives
    state: int  # bytes of weights, gradients and slots
    least: int  # bytes that the program cannot do without
    activations: float  # bytes of what is kept for the backward pass, and of temporaries
    idle: float = 1.0  # by how much a pipeline's idle time lengthens the work of its stages
    hosted: float = 0.0  # bytes in the memory of the device's host
    moves: float = 0.0  # seconds of the moves from and to it
    pace: Pace = AS_RATED  # the machine's

    def Seconds(self, by: Correction) -> float:
        """The time of a step."""
        work = sum(seconds * by.work.get(part, 1.0) for part, seconds in self.work.items())
        computing = self.idle * (work + by.rest * self.rest)
        return self.pace.Seconds(computing, by.network * self.network, by.waiting * self.moves)

    def Bytes(self, by: Correction) -> float:
        """The bytes that one device needs."""
        return self.state + by.memory * self.activations


class Estimator:
    """Estimates candidates of one experiment on one machine.

    Args:
        states: gives what counts the state, for a type of activations and what is offloaded.
        itemsizes: bytes of an element of activations, by their type.
    """

    def __init__(
        self,
        work: Workload,
        states: Callable[[str, tuple[str, ...]], StateBytes],
        machine: Machine,
        itemsizes: Mapping[str, int],
    ):
        self._work, self._states, self._machine = work, states, machine
        self._itemsizes = itemsizes
        self._forward: dict[tuple[MeshLayout, str], ForwardWork] = {}
        self._held: dict[tuple[MeshLayout, str, str, tuple[str, ...]], StateSize] = {}

    def Of(self, candidate: Candidate) -> Estimate:
        """The estimate of a candidate, uncorrected."""
        layout, dtype = candidate.layout, candidate.fprop_dtype
        key = (layout, dtype)
        if key not in self._forward:
            itemsize = self._itemsizes[dtype]
            self._forward[key] = forward(self._work, layout, itemsize, self._On(layout))
        state = (layout, dtype, candidate.shard_state, candidate.offload)
        if state not in self._held:
            counted = self._states(dtype, candidate.offload)
            self._held[state] = counted.On(layout, candidate.shard_state)
        return self._Combined(candidate, self._forward[key], self._held[state])

    def _On(self, layout: MeshLayout) -> MeshMachine:
        return MeshMachine(layout.mesh, self._machine)

    def _Combined(self, candidate: Candidate, once: ForwardWork, state: StateSize) -> Estimate:
        parts, idle = candidate.micro_batches, self._Idle(candidate)
        whole = self._Gathered(candidate, state)
        least = state.kept + whole
        activations = self._Activations(candidate, once)
        hosted, moved = float(sum(state.hosted.values())), float(state.Moved())
        if ACTIVATIONS in candidate.offload:
            hosted, moved, activations = hosted + activations, moved + 2 * parts * activations, 0.0
        elif candidate.layout.stages == 1:
            least += int(once.boundaries / parts)
        # One block is on its way in and one on its way out.
        passing = 2 * hosted / max(sum(self._work.blocks.values()), 1)
        beside = activations + self._Copies(candidate, state) + passing
        return Estimate(
            work=_work(candidate, once),
            rest=(_PASSES * once.boundaries + state.Updating(self._work.passes, parts))
            / self._machine.hbm_bandwidth,
            network=_network(candidate, once, idle) + self._OfState(candidate, state),
            state=state.total,
            least=least,
            activations=whole + beside + BESIDE * once.block / parts,
            idle=idle,
            hosted=hosted,
            moves=moved / self._machine.host_bandwidth,
            pace=self._machine.pace,
        )

    def _Idle(self, candidate: Candidate) -> float:
        """The factor by which idle time lengthens the work of a pipeline; stages with fewer layers wait too."""
        stages, ticks = candidate.layout.stages, candidate.repeats * candidate.micro_batches
        if stages == 1:
            return 1.0
        parts = stages * candidate.repeats
        padded = max(parts * -(-n // parts) / n for n in self._work.blocks.values())
        return padded * (ticks + stages - 1) / ticks

    def _Activations(self, candidate: Candidate, once: ForwardWork) -> float:
        """Bytes that are kept from the forward to the backward pass of a micro-batch, or of those in a pipeline."""
        stages, parts, repeats = candidate.layout.stages, candidate.micro_batches, candidate.repeats
        stored = once.boundaries + sum(saved.bytes for saved in once.SavedBy(candidate.remat))
        if stages == 1:
            return stored / parts
        # A stage keeps inputs of its own, and of each stack before another one for the ticks of that one too.
        one = once.boundaries / max(sum(self._work.blocks.values()), 1) / parts
        ticks = [2 * repeats * stages * (i + 1) - 1 for i in range(len(self._work.blocks))]
        inputs = one * sum(min(n, repeats * parts + stages - 1) for n in ticks)
        return inputs + stored / stages / parts

    def _Copies(self, candidate: Candidate, state: StateSize) -> float:
        """Bytes of copies of the state that micro-batches and pipelines need beside it."""
        if candidate.layout.stages > 1:
            return state.weights + state.gradients if self._Exchanges(candidate) else 0
        if candidate.micro_batches == 1:
            return 0.0
        # XLA casts weights before the loop over micro-batches, all at once and in several layouts: 1.5 times their
        # bytes in a plan of MoE(2048E, 36L) for v5p:4x4x4.
        narrow = self._itemsizes[candidate.fprop_dtype] == 2
        return state.Sums(candidate.micro_batches) + (1.5 * state.weights if narrow else 0)

    def _Exchanges(self, candidate: Candidate) -> bool:
        """Whether a step begins by moving weights to the stages that need them: of interleaved and uneven stages."""
        stages = candidate.layout.stages
        uneven = any(n % stages for n in self._work.blocks.values())
        return stages > 1 and (candidate.repeats > 1 or uneven)

    def _Gathered(self, candidate: Candidate, state: StateSize) -> int:
        """Bytes of the sharded weights that are whole at a time: those of a stage, else those of a block."""
        if candidate.shard_state != WEIGHTS:
            return 0
        return state.gathered if candidate.layout.stages > 1 else state.at_once

    def _OfState(self, candidate: Candidate, state: StateSize) -> float:
        """Seconds to sum gradients and to gather weights."""
        layout, on = candidate.layout, self._On(candidate.layout)
        total = sum(on.Seconds("all-reduce", size, axes) for axes, size in state.synced.items())
        times = candidate.micro_batches if layout.stages == 1 else 1
        gathers = {NONE: 0, SLOTS: 1, GRADIENTS: 1, WEIGHTS: 2 * times}
        copies = [a for a in layout.mesh.axis_names if a != STAGE]
        one = on.Seconds("all-gather", state.gathered, copies)
        seconds = total * times + gathers[candidate.shard_state] * one
        if self._Exchanges(candidate):  # and gradients move back
            seconds += on.Seconds("all-to-all", state.weights + state.gradients, [STAGE])
        return seconds


def _again(candidate: Candidate) -> int:
    """The number of times that blocks are computed again: the loop of a stage over its blocks does it once more."""
    return 2 if candidate.layout.stages > 1 else 1


def _work(candidate: Candidate, once: ForwardWork) -> dict[str, float]:
    """Seconds of products, by part: forward, twice that backward, and what blocks compute again."""
    work = {part: 3 * seconds for part, seconds in once.work.items()}
    for part, seconds in once.of_blocks.items():
        work[part] += _again(candidate) * seconds
    for saved in once.SavedBy(candidate.remat):
        for part, seconds in saved.seconds.items():
            work[part] -= seconds
    if Softmax.PART in work and candidate.repeats > 1:
        # An interleaved schedule has V M - (V - 1) K ticks with a loss instead of M.
        repeats, stages = candidate.repeats, candidate.layout.stages
        work[Softmax.PART] *= repeats - (repeats - 1) * stages / candidate.micro_batches
    return work


def _network(candidate: Candidate, once: ForwardWork, idle: float) -> float:
    """Seconds of the collectives of activations: forward, backward, and of what blocks compute again."""
    again = _again(candidate) * once.network_of_blocks
    again -= sum(saved.network for saved in once.SavedBy(candidate.remat))
    outside = once.network - once.network_of_blocks
    return outside + idle * (once.network_of_blocks + once.moves + again + once.backward_sums)
