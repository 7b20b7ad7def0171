"""The bytes that a device holds and moves in a training step, before anything is compiled.

The trainer's refusal of a run, the choice of recomputation, remedies and both searches for a strategy ask here for the
bytes of the state, of its update, and of the backward pass. state.py reads a task for them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lingvo_moe.core.sharding.letters import GRADIENTS, NONE, SLOTS, WEIGHTS, shards

# While the backward pass differentiates an activation, or a block, so many times its bytes are there beside it: its
# gradient, and one more value of that size.
BESIDE = 2


@dataclass(frozen=True)
class Sharded:
    """The bytes of a variable, or of several equal ones, on one device."""

    whole: int  # bytes if devices hold copies along the axes that the variable leaves out
    parted: int  # bytes if these axes shard it too, where they can
    hosted: bool = False  # whether it is in the memory of the hosts
    blocks: int = 1  # the blocks of its stack of layers; 1 outside of stacks
    # The mesh axes along which devices have terms of the gradient's sum.
    terms: tuple[str, ...] = ()
    part: str = SLOTS  # or WEIGHTS or GRADIENTS

    def Of(self, part: str, times: int = 1) -> "Sharded":
        """The bytes of so many equal variables of a part of the state; all but weights and gradients are slots."""
        part = part if part in (WEIGHTS, GRADIENTS) else SLOTS
        return replace(self, part=part, whole=self.whole * times, parted=self.parted * times)


@dataclass
class StateSize:
    """The bytes of a training state on one device."""

    # `weights`, `gradients`, `slots`: in its own memory; slots are all but weights and gradients.
    weights: int = 0
    gradients: int = 0
    slots: int = 0
    # In its host's memory, of WEIGHTS, GRADIENTS and SLOTS.
    hosted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((WEIGHTS, GRADIENTS, SLOTS), 0)
    )
    gathered: int = 0  # the whole size of the weights that a step gathers
    # Of weights that are gathered while they are used: those outside of stacks, and one block of each stack.
    at_once: int = 0
    # Of weights that are gathered after the update, and are then there beside the old ones.
    written: int = 0
    # Of gradients, by the mesh axes along which devices have terms of their sums.
    synced: Counter[tuple[str, ...]] = field(default_factory=Counter)

    @property
    def kept(self) -> int:
        """The bytes in the device's own memory between two steps."""
        return self.weights + self.slots

    @property
    def total(self) -> int:
        """The bytes in the device's own memory while all gradients are there."""
        return self.kept + self.gradients

    def Sums(self, micro_batches: int) -> int:
        """The bytes of the sums of gradients, which micro-batches need beside the gradients of one."""
        return self.gradients if micro_batches > 1 else 0

    def Updating(self, passes: int = 1, micro_batches: int = 1) -> int:
        """The bytes that an update reads and writes in the device's own memory.

        It reads all gradients for their norm, then gradients and weights `passes` times, as the optimizer says
        (BaseOptimizer.PASSES), and slots once, and writes weights and slots. Each further micro-batch reads its
        gradients and their sum, and writes the sum.
        """
        once = (1 + passes) * (self.gradients + self.weights) + 2 * self.slots
        return once + 3 * (micro_batches - 1) * self.gradients

    def Moved(self) -> int:
        """The bytes that a step moves from and to the host, as docs/state.md says.

        Weights come for the forward pass, for the backward pass and for the update, and go back after this; gradients
        go once, and come for their norm and for the update; slots come and go.
        """
        there = self.hosted
        return 4 * there[WEIGHTS] + 3 * there[GRADIENTS] + 2 * there[SLOTS]


def tally(variables: Iterable[Sharded], level: str) -> StateSize:
    """Adds up a state under a level of train.shard_state."""
    size, here = StateSize(), dict.fromkeys((WEIGHTS, GRADIENTS, SLOTS), 0)
    for variable in variables:
        there = size.hosted if variable.hosted else here
        there[variable.part] += variable.parted if shards(level, variable.part) else variable.whole
        if variable.part == GRADIENTS:
            size.synced[variable.terms] += variable.whole
        if variable.part == WEIGHTS and level != NONE and variable.parted < variable.whole:
            size.gathered += variable.whole
            if level == WEIGHTS:
                size.at_once += variable.whole // variable.blocks
            elif not variable.hosted:
                size.written += variable.whole
    size.weights, size.gradients, size.slots = here[WEIGHTS], here[GRADIENTS], here[SLOTS]
    return size
