"""Reads from a task what step_bytes.py adds up: the variables of its state, and the inputs of its blocks."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lingvo_moe.analysis.plans.memory.step_bytes import Sharded, StateSize, tally
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.checks import STATE_LEVELS
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.base_optimizer import MASTER
from lingvo_moe.core.pipeline.params import micro_batches_of
from lingvo_moe.core.sharding import DimsMapping, Mesh
from lingvo_moe.core.sharding.letters import (
    DEVICE,
    GRADIENTS,
    HOST,
    SLOTS,
    WEIGHTS,
    part_shape,
    parts_of,
    split_over_copies,
)
from lingvo_moe.core.state.offload import loops
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.inspect import bytes_of, bytes_per_device, itemsize_of

# The parts of a state, in the order of a plan.
PARTS = (WEIGHTS, GRADIENTS, "master weights", SLOTS, "moving average")


def held(task: BaseTask, mesh: Mesh) -> StateSize:
    """Counts the training state of a task over a mesh."""
    return tally(_on_mesh(task, mesh), task.p.shard_state)


def block_inputs(task: BaseTask, batch: NestedMap) -> int:
    """Bytes of the inputs of all blocks, on all devices together: what recomputation keeps of a batch (ArraySpecs)."""
    return task.fprop_dtype.size * sum(task.Costs().BlockInputs(batch).values())


def least_activations(task: BaseTask, batch: NestedMap) -> int:
    """A lower bound of the bytes of activations that a step needs, on all devices together."""
    return block_inputs(task, batch) + task.fprop_dtype.size * task.Costs().LargestInside(batch)


def _on_mesh(task: BaseTask, mesh: Mesh) -> list[Sharded]:
    return [sharded(spec, spec.split, mesh).Of(part) for part, spec in state_variables(task)]


def sharded(spec: VariableSpec, split: DimsMapping, mesh: Mesh) -> Sharded:
    """The bytes of a variable that is sharded as `split` says."""
    of_a_layer = range(spec.stack_dims, len(spec.shape))
    everywhere = split_over_copies(spec.shape, split, of_a_layer, mesh)
    whole, parted = (math.prod(part_shape(spec.shape, s, mesh)) for s in (split, everywhere))
    itemsize = itemsize_of(spec.dtype)
    return Sharded(
        itemsize * whole,
        itemsize * parted,
        spec.memory == HOST,
        spec.shape[0] if spec.stack_dims else 1,
    )


def parts_of_batch(task: BaseTask, params: Params, mesh: Mesh) -> int:
    """The number of devices with different rows of a batch, times that of micro-batches."""
    return micro_batches_of(params)[1] * parts_of("B", mesh, [task.p.activation_split])


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
            {"offload": name, "bytes": held(one, mesh).total} for name, one in offloaded.items()
        ],
    }


def _rows(task: BaseTask, mesh: Mesh) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for part, spec in state_variables(task):
        sizes = sums[part, spec.dtype, spec.memory]
        sizes[0] += bytes_of(spec)
        sizes[1] += bytes_per_device(spec, mesh)
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
