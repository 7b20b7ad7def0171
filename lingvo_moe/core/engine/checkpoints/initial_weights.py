"""Initialises a run with the weights of another run's checkpoint, or with all of its state.

Rows of tables may be reordered, and a model may grow out of a smaller one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.checkpoints.packed_tensors import PackedLayout
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap, flatten_items, pack, skeleton
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.step import Step


@dataclass(frozen=True)
class Places:
    """The index, in the other run's variable, of each element along one dimension of a variable."""

    dim: int  # the dimension
    # int [size of the dimension], the index there of each element; -1 for a new one.
    before: np.ndarray


@dataclass(frozen=True)
class InitialWeights:
    """The weights to initialise a run with."""

    directory: str  # the other run's checkpoints
    step: int  # the checkpoint's step
    # By path, the Places of variables whose elements are reordered or new; such a variable may have another size along
    # that dimension. All other variables are copied unchanged.
    moved: Mapping[str, Places]
    # The task of these weights, out of which the run's task grows; None: they are alike.
    small: BaseTask | None = None
    # The other parts of the state to take over, e.g. ('slots', 'step').
    more: tuple[str, ...] = ()

    @property
    def keeps_state(self) -> bool:
        """Whether the run goes on where the other one stood, instead of beginning at step 0."""
        return bool(self.more)

    def Into(
        self, state: NestedMap, task: BaseTask, engine: Engine, packing: PackedLayout | None = None
    ) -> tuple[NestedMap, dict[str, Any]]:
        """Returns the state of the task with these weights, and the `extra` of the checkpoint, e.g. the place in the
        data. New elements keep their value. `state` must not be used again.

        Reordered tables pass through the memory of every process in full. Other variables are read onto the
        devices with their sharding, and none is held twice, unless the task grows.

        `packing` is that of the state, None where it packs nothing.

        Raises:
            CheckpointError: no such step, a damaged one, or one of another model.
        """
        there, here = (self.small or task).StateSpecs(), task.StateSpecs()
        # One Checkpointer for all parts: each reads the files of the step to verify them.
        with Checkpointer(self.directory, read_only=True) as saved:
            for name in ("theta", *self.more):
                fresh, state[name] = state[name], NestedMap()
                moving = self.moved if name == "theta" else ()
                tables = {path: fresh.GetItem(path) for path in moving}
                if self.small is None or not isinstance(fresh, NestedMap):
                    del fresh  # frees memory
                    state[name] = self._read(saved, name, tables, here[name], engine, packing)
                    continue
                grow = Step("grow", task.Grow, [there[name], here[name]], results=here[name])
                small = self._read(saved, name, tables, there[name], engine)
                state[name] = engine.Once(grow, small, fresh)
            return state, saved.ReadExtra(self.step)

    def _read(
        self,
        saved: Checkpointer,
        part: str,
        fresh: dict[str, Any],
        specs: Any,
        engine: Engine,
        packing: PackedLayout | None = None,
    ) -> Any:
        """The checkpoint's part of the state, of these specs; `fresh`, new values of moved tables, gets empty."""
        items = flatten_items(NestedMap({part: specs}))
        named = {path.removeprefix(f"{part}."): TensorSpec.Of(s, path) for path, s in items}
        whole = [path for path in named if path not in fresh]
        tensors = saved.RestoreTensors([named[p] for p in whole], engine, self.step, packing)
        weights = dict(zip(whole, tensors, strict=True))
        for path in fresh.copy():
            old, _ = saved.RestoreToNumpy(f"theta.{path}", self.step)
            table = moved(old, engine.Get([fresh.pop(path)])[0], self.moved[path])
            weights[path] = engine.Put([table], [named[path]])[0]
        return pack(skeleton(specs), [weights[path] for path in named])


def moved(old: Any, fresh: Any, places: Places) -> np.ndarray:
    """Copies the elements of `old` to their new indices in `fresh` along `places.dim`."""
    out, is_old = np.array(fresh), places.before >= 0
    rows, old_rows = (np.moveaxis(table, places.dim, 0) for table in (out, np.asarray(old)))
    rows[is_old] = old_rows[places.before[is_old]]
    return out
