"""The bytes of a training state on one device under any layout, from the specs of one instance of the task."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.schedule import STAGE
from lingvo_moe.core.sharding import Axis, DimsMapping, Mesh, dims_mapping
from lingvo_moe.core.sharding.letters import (
    GRADIENTS,
    HOST,
    NONE,
    SLOTS,
    WEIGHT_LETTERS,
    WEIGHTS,
    axes_of,
    shards,
    split_over_copies,
)
from lingvo_moe.core.strategies.layout import Layout
from lingvo_moe.core.strategies.workload import without_strategy
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.inspect import bytes_of

PARTS = (WEIGHTS, GRADIENTS, SLOTS)
_WHOLE = "-"


@dataclass(frozen=True)
class _Shape:
    """The properties of a variable that decide how it is sharded.

    Attributes:
        sizes: of its dimensions.
        letters: of these, _WHOLE for one that is never sharded.
        stack_dims: how many leading dimensions count layers.
    """

    sizes: tuple[int, ...]
    letters: str
    stack_dims: int


@dataclass(frozen=True)
class _Variables:
    """Equal variables of a state: which of PARTS, their shape, bytes of an element, and whether they are the hosts'."""

    part: str
    shape: _Shape
    itemsize: int
    hosted: bool


@dataclass(frozen=True)
class _Parted:
    """A variable under a layout.

    Attributes:
        whole: its elements on one device where copies are held.
        parts: those where no axis holds copies.
        terms: the mesh axes along which devices have terms of its gradient.
    """

    whole: int
    parts: int
    terms: tuple[str, ...]


@dataclass(frozen=True)
class Held:
    """Bytes on one device.

    Attributes:
        weights, gradients, slots: of these in its memory; slots include the moving average.
        hosted: of each of these in its host's memory, by PARTS.
        gathered: of the weights that a step gathers, when they are whole.
        synced: of gradients by the mesh axes along which devices have terms of their sums.
    """

    weights: int
    gradients: int
    slots: int
    hosted: Mapping[str, int]
    gathered: int
    synced: Mapping[tuple[str, ...], int]

    @property
    def total(self) -> int:
        """All that is there at one time at the least."""
        return self.weights + self.gradients + self.slots


class StateBytes:
    """Counts the bytes of an experiment's state.

    Args:
        params: of the experiment.
        narrow: whether gradients of stacks have two bytes an element, as with bfloat16 activations.
        offload: what is in the memory of the hosts.

    Raises:
        OffloadError: `offload` would free nothing.
    """

    def __init__(self, params: Params, narrow: bool = False, offload: Sequence[str] = ()):
        # Axes with the names of letters tell which dimensions follow which letter.
        letters = {n: n for n in WEIGHT_LETTERS}
        plain = without_strategy(params.task).Set(weight_split=letters)
        task = (plain.Set(offload=list(offload)) if offload else plain).Instantiate()
        self._variables = Counter(_variables(part, spec, narrow) for part, spec in _parts(task))
        self._shapes = {each.shape for each in self._variables}
        self._layout: Layout | None = None
        self._parted: dict[_Shape, _Parted] = {}

    def On(self, layout: Layout, level: str) -> Held:
        """The bytes under a layout and a level of train.shard_state."""
        if layout != self._layout:
            self._layout = layout
            self._parted = {shape: _part(shape, layout) for shape in self._shapes}
        sums, hosted = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
        synced: Counter[tuple[str, ...]] = Counter()
        gathered = 0
        for each, count in self._variables.items():
            parted, size = self._parted[each.shape], count * each.itemsize
            there = hosted if each.hosted else sums
            there[each.part] += size * (parted.parts if shards(level, each.part) else parted.whole)
            if each.part == WEIGHTS and level != NONE and parted.parts < parted.whole:
                gathered += size * parted.whole
            if each.part == GRADIENTS:
                synced[parted.terms] += size * parted.whole
        return Held(sums[WEIGHTS], sums[GRADIENTS], sums[SLOTS], hosted, gathered, dict(synced))


def _parts(task: BaseTask) -> Sequence[tuple[str, VariableSpec]]:
    state = task.StateSpecs()
    kept = [*state.slots.Flatten(), *state.get("ema", NestedMap()).Flatten()]
    return [
        *((WEIGHTS, spec) for spec in state.theta.Flatten()),
        *((GRADIENTS, spec) for spec in state.theta.Flatten() if spec.trainable),
        *((SLOTS, spec) for spec in kept),
    ]


def _variables(part: str, spec: VariableSpec, narrow: bool) -> _Variables:
    itemsize = bytes_of(spec) // math.prod(spec.shape)
    if narrow and part == GRADIENTS and spec.stack_dims:
        itemsize = min(itemsize, 2)
    letters = "".join("".join(axes_of(axis)) or _WHOLE for axis in spec.split)
    if spec.stack_dims:
        letters = "L" + letters[1:]
    shape = _Shape(spec.shape, letters, spec.stack_dims)
    return _Variables(part, shape, itemsize, spec.memory == HOST)


def _part(each: _Shape, layout: Layout) -> _Parted:
    """The elements of a variable on one device."""
    of_weights: dict[str, Axis] = dict(layout.weights)
    if layout.stages > 1:
        of_weights = {"V": STAGE, **of_weights, "L": STAGE}
    split = dims_mapping(each.letters, of_weights)
    used = {a for axis in split for a in axes_of(axis)}
    free = range(each.stack_dims, len(each.sizes))
    parts = split_over_copies(each.sizes, split, free, layout.mesh)
    return _Parted(
        _elements(each, split, layout.mesh),
        _elements(each, parts, layout.mesh),
        tuple(a for a in layout.Axes("B") if a not in used),
    )


def _elements(each: _Shape, split: DimsMapping, mesh: Mesh) -> int:
    return math.prod(
        size if axis is None else -(-size // mesh.axis_size(axis))
        for size, axis in zip(each.sizes, split, strict=True)
    )
