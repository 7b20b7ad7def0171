"""Finds parameters that would make a training step fit that does not, among the choices that a task has.

The state and what is gathered of it are counted from specs (state.py). The rest is scaled from what is live at the peak
of the compiled step: see `saved`. Nothing is compiled again, so these are estimates.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lingvo_moe.analysis.plans.memory.state import block_inputs, held, parts_of_batch
from lingvo_moe.analysis.plans.memory.step_bytes import StateSize
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.checks import either
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.console import units
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import shards
from lingvo_moe.core.state import offload
from lingvo_moe.core.task.base_task import BaseTask

# Savings below this share of the missing bytes are not worth a word.
_WORTH = 0.01
_NARROW = "bfloat16"
# The parameters, each with its values, weaker ones first. Of task.dtype and task.fprop_dtype one is enough.
_STATE = tuple(("train.shard_state", level) for level in checks.STATE_LEVELS[1:])
_OFFLOAD = tuple(
    ("train.offload", what)
    for what in (offload.SLOTS, offload.MASTER, offload.EXPERTS, [offload.EXPERTS, offload.SLOTS])
)
_TYPES = (("task.fprop_dtype", _NARROW), ("task.dtype", _NARROW))
_UNCHANGED = ("", None)


@dataclass(frozen=True)
class Remedy:
    """A choice of parameters, and the bytes that one device holds with it."""

    # The parameters that differ from those of the plan, and their values. No entries: the plan's own.
    changes: Mapping[str, str]
    state: StateSize  # the bytes of the training state
    weight_size: int  # bytes of a weight's element
    narrow: bool  # whether activations are bfloat16
    # Bytes of the inputs of all blocks, where more than these is recomputed than in the plan.
    carries: int | None = None


def advice(
    memory: Mapping[str, Any], task: InstantiableParams, params: Params, mesh: Mesh
) -> list[str]:
    """Sentences for a training step that does not fit: which parameters would make it fit.

    Args:
        memory: the plan's `memory`.
        task: Params of the task that was planned.
        params: the experiment's parameters.
        mesh: that it was planned for.
    """
    planned = task.Instantiate()
    recomputing = task.cls.Strategy(task).Recomputing()
    groups = [_STATE if mesh.size > 1 else (), _OFFLOAD, tuple(recomputing.items()), _TYPES]
    combined = [
        dict(change for change in changes if change != _UNCHANGED)
        for changes in itertools.product(*((_UNCHANGED, *group) for group in groups))
    ]

    def choices(some: Iterable[dict[str, Any]]) -> Iterator[Remedy]:
        for changes in some:
            changed = _changed(task, planned, changes)
            if changed is not None:
                carries = None
                if recomputing.keys() & changes:
                    inputs = block_inputs(changed, params.input.Instantiate().BatchSpec())
                    carries = inputs // parts_of_batch(changed, params, mesh)
                yield _choice(changes, changed, mesh, carries)

    alone = list(choices(changes for changes in combined if len(changes) == 1))
    several = sorted((changes for changes in combined if len(changes) > 1), key=len)
    return remedies(memory, _choice({}, planned, mesh), alone, choices(several))


def saved(memory: Mapping[str, Any], planned: Remedy, other: Remedy) -> int:
    """Estimates by how many bytes a device needs less with another choice; negative: more.

    * Weights and slots are those of the specs. So are gradients, as the share that is live at the peak. While weights
      are gathered after an update, the old and the new ones are there.
    * Copies of weights shrink with these. Activations of 16 bits next to weights of 32 need a copy of them.
    * float32 activations and temporaries halve with bfloat16; recomputation leaves of activations the inputs of blocks.

    Args:
        memory: the plan's `memory`.
        planned: the plan's own choice.
        other: the other one.
    """
    kinds, float32 = memory["kinds"], memory.get("float32", {})
    halves = other.narrow and not planned.narrow

    def left(kind: str) -> float:
        size = kinds.get(kind, 0)
        return size - (float32.get(kind, 0) / 2 if halves else 0)

    was, then = planned.state, other.state
    gradients = kinds.get("gradients", min(was.gradients, kinds["temporaries"]))
    ratio = max(then.gradients, then.written) / max(was.gradients, was.written, 1)
    copies = kinds.get("weight_copies", 0)
    other_copies = copies * then.weights / max(was.weights, 1)
    if halves and other.weight_size > 2:
        other_copies = max(other_copies, then.weights * 2 / other.weight_size)
    activations = left("activations")
    if other.carries is not None:
        activations = min(activations, other.carries)
    before = was.kept + gradients + copies + was.at_once
    after = then.kept + gradients * ratio + other_copies + then.at_once
    before += kinds.get("activations", 0) + kinds["temporaries"]
    return round(before - after - activations - left("temporaries"))


def remedies(
    memory: Mapping[str, Any], planned: Remedy, alone: Sequence[Remedy], several: Iterable[Remedy]
) -> list[str]:
    """Sentences that say which changes make a program fit, alone or together, and the bytes of each, largest first.

    Args:
        memory: the plan's `memory`, of a program that does not fit.
        planned: the plan's own choice.
        alone: choices with one change.
        several: choices with several changes, the fewest first; of these the first that is enough is proposed.
    """
    missing = memory["misses_by"]
    by_choice = [(saved(memory, planned, choice), choice) for choice in alone]
    less = sorted((c for c in by_choice if c[0] >= _WORTH * missing), key=lambda c: -c[0])
    sentences = []
    if less:
        listed = ", ".join(f"{units.size(n)} with {_named(choice)}" for n, choice in less)
        sentences.append(f"By estimate a device would need less: {listed}.")
    enough = [_named(choice) for n, choice in less if n >= missing]
    if enough:
        one = "That is" if len(enough) == 1 else "Each of these is"
        return [
            *sentences,
            f"{either(enough)} would make it fit. {one} enough for {units.size(missing)}.",
        ]
    most = max((n for n, _ in by_choice), default=0)
    names = {name for choice in alone for name in choice.changes}
    for choice in several:
        n = saved(memory, planned, choice)
        if n >= missing:
            sentences.append(
                f"None of them alone makes it fit. By estimate {_named(choice)} together do: {units.size(n)} less, and "
                f"{units.size(missing)} are missing."
            )
            return sentences
        most, names = max(most, n), names | choice.changes.keys()
    if names:
        sentences.append(
            f"None of {', '.join(sorted(names))} makes it fit, nor do they together: by estimate "
            f"{units.size(max(most, 0))} less at most, and {units.size(missing)} are missing."
        )
    return sentences


def _named(choice: Remedy) -> str:
    *first, last = (f"{name}={value}" for name, value in choice.changes.items())
    return f"{', '.join(first)} and {last}" if first else last


def _changed(
    task: InstantiableParams, planned: BaseTask, changes: Mapping[str, Any]
) -> BaseTask | None:
    """The task with these changes; None where they do not go together, or one changes nothing."""
    p = task.Copy()
    for path, value in changes.items():
        name = path.partition(".")[2]
        present = planned.p.Get(name)
        if present == value or (name == "shard_state" and shards(present, value)):
            return None
        p.Set(**{name: value})
    try:
        changed = p.Instantiate()
        changed.StateSpecs()
    except ValueError:  # e.g. train.offload=master without bfloat16 weights
        return None
    return changed


def _choice(
    changes: Mapping[str, Any], task: BaseTask, mesh: Mesh, carries: int | None = None
) -> Remedy:
    return Remedy(
        changes={name: _text(value) for name, value in changes.items()},
        state=held(task, mesh),
        weight_size=2 if task.p.dtype == _NARROW else 4,
        narrow=task.p.fprop_dtype == _NARROW,
        carries=carries,
    )


def _text(value: Any) -> str:
    """A value as a flag takes it."""
    return json.dumps(value) if isinstance(value, list) else str(value)
