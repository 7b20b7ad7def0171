"""train.offload: what of a training state, and which activations, are in the memory of the hosts.

Only loops over stacks of layers (layers/repeat.py) have such weights, and only stacks such slots: they are moved layer
by layer, so that a device holds one or two layers of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from lingvo_moe.core.base_layer import BaseLayer, VariableSpec
from lingvo_moe.core.config.checks import NO_OFFLOAD, OFFLOADS, did_you_mean
from lingvo_moe.core.sharding.letters import HOST

SLOTS, MASTER, EXPERTS, ACTIVATIONS = OFFLOADS
Offload = str | Sequence[str]


class OffloadError(ValueError):
    """A train.offload, or train.shard_state=slots, that would free no memory, or that goes with no such model."""


def items_of(offload: Offload) -> tuple[str, ...]:
    """The words and patterns of a value of train.offload; () for 'none'."""
    items = (offload,) if isinstance(offload, str) else tuple(offload)
    return tuple(item for item in items if item != NO_OFFLOAD)


def of_weight(offload: Offload, path: str, parts: Mapping[str, tuple[str, str]]) -> bool:
    """Whether the weights of a stack of layers, with their gradients and slots, lie in the memory of the hosts.

    `path` is the variable's, `parts` what the layers declare (`DeclaredParts`).
    """
    items, part = items_of(offload), parts.get(path.rpartition(".")[0], ("", ""))[0]
    matched = any("*" in item and fnmatchcase(path, item) for item in items)
    return matched or (part == EXPERTS and EXPERTS in items)


def of_slot(offload: Offload, weight: VariableSpec, is_master: bool) -> bool:
    """Whether a slot of a stack of layers lies in the memory of the hosts; `is_master`: it is the weight in float32."""
    items = items_of(offload)
    return weight.memory == HOST or SLOTS in items or (MASTER in items and is_master)


def of_activations(offload: Offload) -> bool:
    """Whether what a loop over layers keeps for its backward pass is the hosts'."""
    return ACTIVATIONS in items_of(offload)


def check_offload(
    offload: Offload,
    task: BaseLayer,
    theta: Iterable[VariableSpec],
    slots: Iterable[VariableSpec],
    averaged: bool,
    pipelined: bool,
) -> None:
    """Checks that each item of train.offload frees memory, and that train.shard_state=slots does.

    `averaged`: whether the state has a moving average of the weights; `pipelined`: whether pipelined_step.py trains
    it.

    Raises:
        OffloadError: an item that frees none, which says what it would have moved; or an item that does not go with
            this model.
    """
    theta, slots = list(theta), list(slots)
    if task.p.shard_state == SLOTS and not slots and not averaged:
        raise OffloadError(
            f"train.shard_state={SLOTS}: the optimizer has no slots and there is no moving average (task.ema_decay), "
            "so that this would free no memory; leave it out, or set it to gradients or weights"
        )
    there = [spec for spec in slots if spec.memory == HOST]
    for item in items_of(offload):
        of_layers = item in (ACTIVATIONS, EXPERTS) or "*" in item
        if of_layers and pipelined:
            raise OffloadError(
                f"train.offload={item}: the stages of a pipeline keep weights and activations on the devices; offload "
                f"{SLOTS} or {MASTER}, or set task.pipeline.stages=1"
            )
        if item == ACTIVATIONS:
            why = "" if any(loops(task)) else "no layers are repeated in a loop (task.repeat=True)"
        elif item in (SLOTS, MASTER):
            offloaded = [s for s in there if item == SLOTS or s.path.endswith(f".{MASTER}")]
            why = "" if offloaded else "no stack of layers has such slots"
        else:
            why = _why_no_weights(item, theta, task.DeclaredParts())
            if not why and averaged:
                raise OffloadError(
                    f"train.offload={item}: the moving average reads these weights on the devices; set "
                    "task.ema_decay=0, or offload slots alone"
                )
        if why:
            raise OffloadError(
                f"train.offload={item}: {why}, so that this would free no memory; leave it out"
            )


def _why_no_weights(
    item: str, theta: Sequence[VariableSpec], parts: Mapping[str, tuple[str, str]]
) -> str:
    """Says why a pattern moves no weights; '' if it does."""
    matched = [spec for spec in theta if of_weight(item, spec.path, parts)]
    if any(spec.memory == HOST for spec in matched):
        return ""
    if matched:
        names = ", ".join(spec.path for spec in matched[:3])
        return f"it would have moved {names}, which no loop over layers reads (task.repeat=True makes one of a stack)"
    ends = {f"*.{spec.path.rpartition('.')[2]}" for spec in theta}
    near = did_you_mean(item, ends | {spec.path for spec in theta})
    return f"no variable matches{near}, as --mode=inspect_model lists them"


def loops(layer: BaseLayer) -> Iterator[BaseLayer]:
    """The loops over stacks of layers in a model."""
    if layer.ScansLayers():
        yield layer
    for child in layer.children.Flatten():
        yield from loops(child)
