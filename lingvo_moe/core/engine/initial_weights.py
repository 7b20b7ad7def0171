"""Weights of another run's checkpoint for a run to begin with, whose tables may be in another order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints import Checkpointer
from lingvo_moe.core.engine.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap


@dataclass(frozen=True)
class Places:
    """Where the elements of a variable along one dimension lay in the other run's.

    Attributes:
        dim: the dimension.
        before: int [size of the dimension], the place there of each element; -1 for one that is new.
    """

    dim: int
    before: np.ndarray


@dataclass(frozen=True)
class InitialWeights:
    """What to begin with.

    Attributes:
        directory: the other run's checkpoints.
        step: which of them.
        moved: Places of the variables whose elements lie elsewhere or are new, by path; such a variable may have
            another size along that dimension than there. All others are taken as they are.
    """

    directory: str
    step: int
    moved: Mapping[str, Places]

    def Into(self, state: NestedMap, specs: NestedMap, engine: Engine) -> NestedMap:
        """The state with these weights; what is new keeps the value that it has. `state` must not be used again.

        Tables that are moved pass through the memory of every process, whole; other variables are read onto the
        devices as they are cut there, and none is held twice.

        Args:
            state: of BaseTask.StateSpecs, on the engine's devices.
            specs: VariableSpecs of its theta.
            engine: whose tensors these are.

        Raises:
            CheckpointError: no such step, a damaged one, or one of another model.
        """
        fresh = {path: state.theta.GetItem(path) for path in self.moved}
        state.theta = NestedMap()  # makes room
        named = {path: TensorSpec.Of(s, f"theta.{path}") for path, s in specs.FlattenItems()}
        with Checkpointer(self.directory, read_only=True) as checkpointer:
            whole = [path for path in named if path not in self.moved]
            tensors = checkpointer.RestoreTensors([named[p] for p in whole], engine, self.step)
            theta = dict(zip(whole, tensors, strict=True))
            for path, places in self.moved.items():
                old, _ = checkpointer.RestoreToNumpy(f"theta.{path}", self.step)
                table = moved(old, engine.Get([fresh.pop(path)])[0], places)
                theta[path] = engine.Put([table], [named[path]])[0]
        state.theta = specs.Pack([theta[path] for path in named])
        return state


def moved(old: Any, fresh: Any, places: Places) -> np.ndarray:
    """`fresh` with the elements of `old` in their new places along `places.dim`."""
    out, known = np.array(fresh), places.before >= 0
    rows, old_rows = (np.moveaxis(table, places.dim, 0) for table in (out, np.asarray(old)))
    rows[known] = old_rows[places.before[known]]
    return out
