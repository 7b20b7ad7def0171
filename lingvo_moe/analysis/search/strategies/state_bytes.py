"""The bytes of a training state on one device under any layout, from the specs of one instance of the task."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from lingvo_moe.analysis.plans.memory.state import sharded, state_variables
from lingvo_moe.analysis.plans.memory.step_bytes import Sharded, StateSize, tally
from lingvo_moe.analysis.search.strategies.mesh_layout import MeshLayout
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.pipeline.schedule import STAGE
from lingvo_moe.core.sharding import Axis, dims_mapping
from lingvo_moe.core.sharding.letters import WEIGHT_LETTERS, axes_of

_WHOLE = "-"  # the letter of a dimension that is never sharded


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
        task = params.task.cls.Strategy(params.task).Without()
        task.Set(weight_split={n: n for n in WEIGHT_LETTERS})
        options = {"fprop_dtype": fprop_dtype, "offload": list(offload)}
        task.Set(**{name: value for name, value in options.items() if value})
        # How many variables of each kind a part of the state has.
        self._variables: dict[VariableSpec, Counter[str]] = defaultdict(Counter)
        for part, spec in state_variables(task.Instantiate()):
            self._variables[_of_a_kind(spec)][part] += 1
        self._layout: MeshLayout | None = None
        self._sharded: list[Sharded] = []

    def On(self, layout: MeshLayout, level: str) -> StateSize:
        """The bytes under a layout and a level of train.shard_state."""
        if layout != self._layout:
            self._layout = layout
            self._sharded = []
            for spec, parts in self._variables.items():
                one = _on_device(spec, layout)
                self._sharded += [one.Of(part, times) for part, times in parts.items()]
        return tally(self._sharded, level)


def _of_a_kind(spec: VariableSpec) -> VariableSpec:
    """The spec of all variables that lie alike: its letters are those of `split`."""
    letters = "".join("".join(axes_of(axis)) or _WHOLE for axis in spec.split)
    letters = "L" + letters[1:] if spec.stack_dims else letters
    return replace(spec, path="", letters=letters, init=WeightInit.Constant(0), trainable=True)


def _on_device(spec: VariableSpec, layout: MeshLayout) -> Sharded:
    of_weights: dict[str, Axis] = dict(layout.weights)
    if layout.stages > 1:
        of_weights = {"V": STAGE, **of_weights, "L": STAGE}
    split = dims_mapping(spec.letters, of_weights)
    used = {a for axis in split for a in axes_of(axis)}
    on_device = sharded(spec, split, layout.mesh)
    return replace(on_device, terms=tuple(a for a in layout.Axes("B") if a not in used))
