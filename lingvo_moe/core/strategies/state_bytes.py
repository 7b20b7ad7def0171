"""The bytes of a training state on one device under any layout, from the specs of one instance of the task."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.pipeline.schedule import STAGE
from lingvo_moe.core.planner.memory.state import simple_part, state_variables
from lingvo_moe.core.planner.memory.step_bytes import Sharded, StateSize, tally
from lingvo_moe.core.sharding import Axis, dims_mapping
from lingvo_moe.core.sharding.letters import (
    HOST,
    WEIGHT_LETTERS,
    axes_of,
    part_shape,
    split_over_copies,
)
from lingvo_moe.core.strategies.mesh_layout import MeshLayout
from lingvo_moe.core.task.inspect import itemsize_of

_WHOLE = "-"


@dataclass(frozen=True)
class _Shape:
    """The properties of a variable that decide how it is sharded."""

    sizes: tuple[int, ...]  # of its dimensions
    letters: str  # of these, _WHOLE for one that is never sharded
    stack_dims: int  # how many leading dimensions count layers


@dataclass(frozen=True)
class _Variables:
    """Equal variables of a state: their part, shape, bytes of an element, and whether they are the hosts'."""

    part: str
    shape: _Shape
    itemsize: int
    hosted: bool


class StateBytes:
    """Counts the bytes of an experiment's state.

    Args:
        fprop_dtype: of activations; '' for the experiment's own.
        offload: what is in the memory of the hosts.

    Raises:
        OffloadError: `offload` would free nothing.
    """

    def __init__(self, params: Params, fprop_dtype: str = "", offload: Sequence[str] = ()):
        # Axes with the names of letters tell which dimensions follow which letter.
        task = params.task.cls.WithoutStrategy(params.task)
        task.Set(weight_split={n: n for n in WEIGHT_LETTERS})
        given = {"fprop_dtype": fprop_dtype, "offload": list(offload)}
        task.Set(**{name: value for name, value in given.items() if value})
        self._variables = Counter(_variables(*each) for each in state_variables(task.Instantiate()))
        self._layout: MeshLayout | None = None
        self._sharded: list[Sharded] = []

    def On(self, layout: MeshLayout, level: str) -> StateSize:
        """The bytes under a layout and a level of train.shard_state."""
        if layout != self._layout:
            self._layout = layout
            on_device = {s: _on_device(s, layout) for s in {v.shape for v in self._variables}}
            self._sharded = [
                replace(on_device[v.shape], part=v.part, hosted=v.hosted).Times(n * v.itemsize)
                for v, n in self._variables.items()
            ]
        return tally(self._sharded, level)


def _variables(part: str, spec: VariableSpec) -> _Variables:
    letters = "".join("".join(axes_of(axis)) or _WHOLE for axis in spec.split)
    if spec.stack_dims:
        letters = "L" + letters[1:]
    shape = _Shape(spec.shape, letters, spec.stack_dims)
    return _Variables(simple_part(part), shape, itemsize_of(spec.dtype), spec.memory == HOST)


def _on_device(each: _Shape, layout: MeshLayout) -> Sharded:
    """The elements of a variable on one device, in place of its bytes."""
    of_weights: dict[str, Axis] = dict(layout.weights)
    if layout.stages > 1:
        of_weights = {"V": STAGE, **of_weights, "L": STAGE}
    split = dims_mapping(each.letters, of_weights)
    used = {a for axis in split for a in axes_of(axis)}
    free = range(each.stack_dims, len(each.sizes))
    parts = split_over_copies(each.sizes, split, free, layout.mesh)
    return Sharded(
        "",
        math.prod(part_shape(each.sizes, split, layout.mesh)),
        math.prod(part_shape(each.sizes, parts, layout.mesh)),
        blocks=each.sizes[0] if each.stack_dims else 1,
        terms=tuple(a for a in layout.Axes("B") if a not in used),
    )
