"""Counts the bytes that a device holds of a training state, from the specs of its variables.

Checks before a run, the choice of recomputation, plans, remedies and the search for a strategy all count here.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.checks import STATE_LEVELS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.base import MASTER
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import DEVICE, GRADIENTS, HOST, NONE, SLOTS, WEIGHTS, shards
from lingvo_moe.core.state.offload import loops
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.inspect import bytes_of, bytes_per_device, itemsize_of

# The parts of a state, in the order of a plan.
PARTS = (WEIGHTS, GRADIENTS, "master weights", SLOTS, "moving average")


@dataclass(frozen=True)
class Sharded:
    """The bytes of a variable, or of several equal ones, on one device."""

    part: str  # one of WEIGHTS, GRADIENTS and SLOTS; all but the first two count as slots
    whole: int  # bytes if devices hold copies along the axes that the variable leaves out
    parted: int  # bytes if these axes shard it too, where they can
    hosted: bool = False  # whether it is in the memory of the hosts
    blocks: int = 1  # of the stack of layers that it belongs to; 1 outside of stacks
    # The mesh axes along which devices have terms of the gradient's sum.
    terms: tuple[str, ...] = ()

    def Times(self, factor: int) -> "Sharded":
        """The bytes of `factor` equal variables, or of one whose elements have `factor` times the bytes."""
        return replace(self, whole=self.whole * factor, parted=self.parted * factor)


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
    gathered: int = 0  # of the weights that a step gathers, when they are whole
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


def tally(variables: Iterable[Sharded], level: str) -> StateSize:
    """Adds up a state under a level of train.shard_state."""
    held, own = StateSize(), dict.fromkeys((WEIGHTS, GRADIENTS, SLOTS), 0)
    for each in variables:
        there = held.hosted if each.hosted else own
        there[each.part] += each.parted if shards(level, each.part) else each.whole
        if each.part == GRADIENTS:
            held.synced[each.terms] += each.whole
        if each.part == WEIGHTS and level != NONE and each.parted < each.whole:
            held.gathered += each.whole
            if level == WEIGHTS:
                held.at_once += each.whole // each.blocks
            elif not each.hosted:
                held.written += each.whole
    held.weights, held.gradients, held.slots = own[WEIGHTS], own[GRADIENTS], own[SLOTS]
    return held


def held(task: BaseTask, mesh: Mesh) -> StateSize:
    """Counts the training state of a task over a mesh."""
    return tally(_on_mesh(task, mesh), task.p.shard_state)


def _on_mesh(task: BaseTask, mesh: Mesh) -> list[Sharded]:
    return [
        Sharded(
            simple_part(part),
            bytes_per_device(replace(spec, free_dims=()), mesh),
            bytes_per_device(spec.OverCopies(), mesh),
            spec.memory == HOST,
            spec.shape[0] if spec.stack_dims else 1,
        )
        for part, spec in state_variables(task)
    ]


def state_variables(task: BaseTask) -> Iterator[tuple[str, VariableSpec]]:
    """Each variable of a task's training state with its part, one of PARTS.

    A gradient has the number format of its weight. A loop over a stack of layers collects gradients in the format of
    the activations, if this is narrower and they stay on the device (layers/scan.py).
    """
    state = task.StateSpecs()
    looped = any(loops(task))
    for spec in state.theta.Flatten():
        yield WEIGHTS, spec
    for spec in task.GradientSpecs().Flatten():
        if spec.trainable:
            yield GRADIENTS, _looped(spec, task.fprop_dtype.name) if looped else spec
    for path, spec in state.slots.FlattenItems():
        yield "master weights" if path.rpartition(".")[2] == MASTER else SLOTS, spec
    for spec in state.get("ema", NestedMap()).Flatten():
        yield "moving average", spec


def simple_part(part: str) -> str:
    """WEIGHTS, GRADIENTS or SLOTS for one of PARTS."""
    return part if part in (WEIGHTS, GRADIENTS) else SLOTS


def _looped(spec: VariableSpec, activations: str) -> VariableSpec:
    """A gradient as a loop over layers collects it."""
    on_device = spec.stack_dims and spec.memory == DEVICE
    narrower = itemsize_of(activations) < itemsize_of(spec.dtype)
    return replace(spec, dtype=activations) if on_device and narrower else spec


def state_plan(task: BaseTask, mesh: Mesh, offloaded: Mapping[str, BaseTask]) -> dict[str, Any]:
    """Returns the plan's `state`.

    Args:
        task: that is planned.
        mesh: the mesh that the state is sharded over.
        offloaded: the task with each train.offload that would free memory.

    Returns:
        `shard_state`, the level; `parts`, a dict for each part of the state, type and memory, with `part`, `dtype`,
        `memory` (device or host), `bytes_total` (of one copy), `bytes` (of one device) and `copies` (for how many
        devices an element is kept, on average); `levels`, the `bytes` of all parts in a device's memory for each level;
        and `offloads`, the same for each offload.
    """
    variables = _on_mesh(task, mesh)
    return {
        "shard_state": task.p.shard_state,
        "parts": _rows(task, mesh),
        "levels": [
            {"shard_state": level, "bytes": tally(variables, level).total} for level in STATE_LEVELS
        ],
        "offloads": [
            {"offload": name, "bytes": held(each, mesh).total} for name, each in offloaded.items()
        ],
    }


def _rows(task: BaseTask, mesh: Mesh) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for part, spec in state_variables(task):
        found = sums[part, spec.dtype, spec.memory]
        found[0] += bytes_of(spec)
        found[1] += bytes_per_device(spec, mesh)
    return [
        {
            "part": part,
            "dtype": dtype,
            "memory": memory,
            "bytes_total": total,
            "bytes": num_bytes,
            "copies": num_bytes * mesh.size / total,
        }
        for (part, dtype, memory), (total, num_bytes) in sorted(
            sums.items(), key=lambda item: (PARTS.index(item[0][0]), item[0][1:])
        )
    ]
