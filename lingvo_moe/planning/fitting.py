"""Finds parameters that would make a training step fit that does not, among the choices that a task has.

core/planner/memory/remedies.py estimates their memory.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers import kept
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.params import micro_batches_of, settings_of
from lingvo_moe.core.planner.memory.remedies import Choice, remedies
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import DEVICE, SLOTS, WEIGHTS, parts_of, shards
from lingvo_moe.core.state import offload
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.inspect import bytes_per_device

_NARROW = "bfloat16"
# The parameters, each with its values, weaker ones first. Of task.dtype and task.fprop_dtype one is enough.
_STATE = tuple(("train.shard_state", level) for level in checks.STATE_LEVELS[1:])
_OFFLOAD = tuple(
    ("train.offload", what)
    for what in (offload.SLOTS, offload.MASTER, offload.EXPERTS, [offload.EXPERTS, offload.SLOTS])
)
_TYPES = (("task.fprop_dtype", _NARROW), ("task.dtype", _NARROW))
_UNCHANGED = ("", None)
Change = tuple[str, Any]  # the path of a parameter, and its value


def advice(
    memory: Mapping[str, Any], task: InstantiableParams, params: Params, mesh: Mesh
) -> list[str]:
    """Sentences for a training step that does not fit: see core/planner/memory/remedies.py.

    Args:
        memory: the plan's `memory`.
        task: Params of the task that was planned.
        params: the experiment's parameters.
        mesh: that it was planned for.
    """
    planned = task.Instantiate()
    groups = [_STATE if mesh.size > 1 else (), _OFFLOAD, _remat(task), _TYPES]
    others = []
    for changes in itertools.product(*((_UNCHANGED, *group) for group in groups)):
        chosen = dict(change for change in changes if change != _UNCHANGED)
        changed = _changed(task, planned, chosen)
        if chosen and changed is not None:
            others.append(_choice(chosen, changed, params, mesh))
    return remedies(memory, _choice({}, planned, params, mesh), others)


def _remat(task: InstantiableParams) -> tuple[Change, ...]:
    """The choices that recompute as much as possible; () where a task does, or has no such parameter, or a pipeline."""
    if "remat" not in task or settings_of(task):
        return ()
    if task.repeat is False:
        return (("task.repeat", True),)
    return () if task.remat == kept.FULL else (("task.remat", "full"),)


def _changed(
    task: InstantiableParams, planned: BaseTask, changes: Mapping[str, Any]
) -> BaseTask | None:
    """The task with these changes; None where they do not go together, or one changes nothing."""
    p = task.Copy()
    for path, value in changes.items():
        name = path.partition(".")[2]
        now = planned.p.Get(name)
        if now == value or (name == "shard_state" and shards(now, value)):
            return None
        p.Set(**{name: value})
    try:
        changed = p.Instantiate()
        changed.StateSpecs()
    except ValueError:  # e.g. train.offload=master without bfloat16 weights
        return None
    return changed


def _choice(changes: Mapping[str, Any], task: BaseTask, params: Params, mesh: Mesh) -> Choice:
    state, level = task.StateSpecs(), task.p.shard_state
    theta = state.theta.Flatten()
    narrow = task.p.fprop_dtype == _NARROW
    rest = [s for part in ("slots", "ema") for s in state.get(part, NestedMap()).Flatten()]
    held = {spec.path: _on_device(spec, mesh) for spec in theta}
    parts = {spec.path: _on_device(spec.OverCopies(), mesh) for spec in theta}
    written = gathered = 0
    if shards(level, WEIGHTS):
        gathered = sum(_gathered(spec, mesh) for spec in theta)
    elif shards(level, SLOTS):
        written = sum(n for path, n in held.items() if parts[path] < n)
    recomputes = {"task.remat", "task.repeat"} & set(changes)
    return Choice(
        changes={name: _text(value) for name, value in changes.items()},
        weights=sum(held.values()),
        slots=sum(_on_device(spec, mesh) for spec in rest),
        gradients=sum(_gradient(spec, mesh, narrow) for spec in task.GradientSpecs().Flatten()),
        written=written,
        gathered=gathered,
        weight_size=2 if task.p.dtype == _NARROW else 4,
        narrow=narrow,
        carries=_carries(task, params, mesh) if recomputes else None,
    )


def _text(value: Any) -> str:
    """A value as a flag takes it."""
    return json.dumps(value) if isinstance(value, list) else str(value)


def _on_device(spec: VariableSpec, mesh: Mesh) -> int:
    """Bytes of a variable in the memory of a device."""
    return bytes_per_device(spec, mesh) if spec.memory == DEVICE else 0


def _gradient(spec: VariableSpec, mesh: Mesh, narrow: bool) -> int:
    """Bytes of a variable's gradient on a device; that of a stack has the type of the activations."""
    if not spec.trainable:
        return 0
    held = _on_device(spec, mesh)
    return held // 2 if narrow and spec.stack_dims and spec.dtype == "float32" else held


def _gathered(spec: VariableSpec, mesh: Mesh) -> int:
    """Bytes of a sharded weight that are gathered at a time: all, or of a stack one layer's."""
    whole = bytes_per_device(replace(spec, free_dims=()), mesh)
    if whole == bytes_per_device(spec, mesh):
        return 0
    return whole // spec.shape[0] if spec.stack_dims else whole


def _carries(task: BaseTask, params: Params, mesh: Mesh) -> int:
    """Bytes on a device of the inputs of all blocks of a Transformer's stacks."""
    counts = task.BatchCounts(params.input.Instantiate().BatchSpec()).values()
    size = task.p.model_dim * task.fprop_dtype.size
    blocks = (task.children[stack].p.num_blocks for stack in task.STACKS)
    held = sum(size * tokens * num for tokens, num in zip(counts, blocks, strict=True))
    _, micro_batches = micro_batches_of(params)
    return held // (parts_of("B", mesh, [task.p.activation_split]) * micro_batches)
