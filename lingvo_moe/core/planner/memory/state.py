"""The training state of one device, from specs alone: what holds it, in which type, and how much of it is copies."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.base import MASTER
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import DEVICE
from lingvo_moe.core.task.inspect import bytes_of, bytes_per_device

# The parts of a state, in the order of a plan.
PARTS = ("weights", "gradients", "master weights", "slots", "moving average")


@dataclass(frozen=True)
class State:
    """The specs of a training state.

    Attributes:
        kept: BaseTask.StateSpecs.
        gradients: BaseTask.GradientSpecs.
    """

    kept: NestedMap
    gradients: NestedMap


def state_plan(
    states: Mapping[str, State], level: str, mesh: Mesh, offloads: Mapping[str, State]
) -> dict[str, Any]:
    """Returns the plan's `state`.

    Args:
        states: the state of each level of train.shard_state.
        level: the one that is planned.
        mesh: the mesh that it is sharded over.
        offloads: the state of each train.offload that would free memory, at that level.

    Returns:
        `shard_state`, the level; `parts`, a dict for each part of the state, type and memory, with `part`, `dtype`,
        `memory` (device or host), `bytes_total` (of one copy), `bytes` (of one device) and `copies` (for how many
        devices an element is kept, on average); `levels`, the `bytes` of all parts in a device's memory for each level;
        and `offloads`, the same for each offload.
    """
    return {
        "shard_state": level,
        "parts": _rows(states[level], mesh),
        "levels": [
            {"shard_state": each, "bytes": _on_device(state, mesh)}
            for each, state in states.items()
        ],
        "offloads": [
            {"offload": each, "bytes": _on_device(state, mesh)} for each, state in offloads.items()
        ],
    }


def _on_device(state: State, mesh: Mesh) -> int:
    """Bytes of all parts in the memory of one device."""
    return sum(row["bytes"] for row in _rows(state, mesh) if row["memory"] == DEVICE)


def _rows(state: State, mesh: Mesh) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for part, spec in _parts(state):
        found = sums[part, spec.dtype, spec.memory]
        found[0] += bytes_of(spec)
        found[1] += bytes_per_device(spec, mesh)
    return [
        {
            "part": part,
            "dtype": dtype,
            "memory": memory,
            "bytes_total": total,
            "bytes": held,
            "copies": held * mesh.size / total,
        }
        for (part, dtype, memory), (total, held) in sorted(
            sums.items(), key=lambda item: (PARTS.index(item[0][0]), item[0][1:])
        )
    ]


def _parts(state: State) -> Iterator[tuple[str, VariableSpec]]:
    for spec in state.kept.theta.Flatten():
        yield "weights", spec
    for spec in state.gradients.Flatten():
        if spec.trainable:
            yield "gradients", spec
    for path, spec in state.kept.slots.FlattenItems():
        yield "master weights" if path.rpartition(".")[2] == MASTER else "slots", spec
    for spec in state.kept.get("ema", NestedMap()).Flatten():
        yield "moving average", spec
