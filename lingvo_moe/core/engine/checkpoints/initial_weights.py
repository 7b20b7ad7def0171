"""Initialises a run with the weights of another run's checkpoint; rows of tables may be reordered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.checkpoints.packed_tensors import Packing
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.step import Step


@dataclass(frozen=True)
class Places:
    """For one dimension of a variable, the index of each element in the other run's variable."""

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

    def Into(
        self, state: NestedMap, task: BaseTask, engine: Engine, packing: Packing | None = None
    ) -> NestedMap:
        """Returns the state of the task with these weights; new elements keep their value. `state` must not be used
        again.

        Reordered tables pass through the memory of every process in full. Other variables are read onto the
        devices with their sharding, and none is held twice, unless the task grows.

        `packing` is that of the state, None where it packs nothing.

        Raises:
            CheckpointError: no such step, a damaged one, or one of another model.
        """
        theta, specs = state.theta, task.VariableSpecs()
        tables = {path: theta.GetItem(path) for path in self.moved}
        state.theta = NestedMap()
        if self.small is None:
            del theta  # frees memory
            state.theta = self._read(tables, specs, engine, packing)
            return state
        before = self.small.VariableSpecs()
        grow = Step("grow", task.Grow, [before, specs], results=specs)
        state.theta = engine.Once(grow, self._read(tables, before, engine), theta)
        return state

    def _read(
        self,
        fresh: dict[str, Any],
        specs: NestedMap,
        engine: Engine,
        packing: Packing | None = None,
    ) -> NestedMap:
        """The checkpoint's weights of these specs; `fresh` are new values of the moved ones, and gets empty."""
        named = {path: TensorSpec.Of(s, f"theta.{path}") for path, s in specs.FlattenItems()}
        with Checkpointer(self.directory, read_only=True) as checkpointer:
            whole = [path for path in named if path not in self.moved]
            wanted = [named[p] for p in whole]
            tensors = checkpointer.RestoreTensors(wanted, engine, self.step, packing)
            theta = dict(zip(whole, tensors, strict=True))
            for path, places in self.moved.items():
                old, _ = checkpointer.RestoreToNumpy(f"theta.{path}", self.step)
                table = moved(old, engine.Get([fresh.pop(path)])[0], places)
                theta[path] = engine.Put([table], [named[path]])[0]
        return specs.Pack([theta[path] for path in named])


def moved(old: Any, fresh: Any, places: Places) -> np.ndarray:
    """Copies the elements of `old` to their new indices in `fresh` along `places.dim`."""
    out, known = np.array(fresh), places.before >= 0
    rows, old_rows = (np.moveaxis(table, places.dim, 0) for table in (out, np.asarray(old)))
    rows[known] = old_rows[places.before[known]]
    return out
