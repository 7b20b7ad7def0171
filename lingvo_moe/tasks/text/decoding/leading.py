"""Programs over a mesh for requests: in a job of several processes the first one leads, and the others follow.

All processes have to run the same programs in the same order, but requests come to one of them. It tells the others
what it runs.
"""

import abc
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.core.engine import devices
from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import SplitMap
from lingvo_moe.core.sharding.letters import parts_of

# The sizes that tell a program from others of the same model, e.g. how long its rows are.
Kind = tuple[int, ...]


@dataclass(frozen=True)
class PlacedWeights:
    """Weights that lie on the devices of an engine."""

    engine: Engine
    theta: NestedMap


class LedPrograms(abc.ABC):
    """Programs that run with weights on an engine's devices.

    Attributes:
        theta: the weights; others of the same shapes may take their place.
        leads: whether this process tells the others of its job what it runs.
    """

    def __init__(self, engine: Engine, theta: NestedMap):
        self.engine, self.theta, self.leads = engine, theta, False

    @abc.abstractmethod
    def Run(self, kind: Kind, inputs: NestedMap) -> Any:
        """Runs the programs of a kind on NumPy arrays, on all processes of the job; tells them first, see Tell."""

    def Tell(self, kind: Kind, inputs: NestedMap) -> None:
        """Tells the processes that follow what is run next, where this one leads."""
        if not self.leads:
            return
        message = io.BytesIO()
        arrays = {f"inputs.{path}": x for path, x in inputs.FlattenItems()}
        np.savez(message, kind=np.asarray(kind), **arrays)
        devices.from_first_process(message.getvalue())

    def Follow(self) -> None:
        """Runs, in a process that does not lead, what the first one tells, until that ends."""
        while told := devices.from_first_process(b""):
            arrays, inputs = np.load(io.BytesIO(told), allow_pickle=False), NestedMap()
            for name in arrays.files:
                if name != "kind":
                    inputs.Set(name.removeprefix("inputs."), arrays[name])
            self.Run(tuple(arrays["kind"].tolist()), inputs)

    def End(self) -> None:
        """Lets the processes end that follow."""
        if self.leads:
            self.leads = False
            devices.from_first_process(b"")


def rows_over(engine: Engine, split: SplitMap, rows: int) -> int:
    """The least number of rows from `rows` on that a model with this activation_split divides over an engine's mesh."""
    parts = math.lcm(*(parts_of(letter, engine.mesh, [split]) for letter in "BG"))
    return -(-rows // parts) * parts
