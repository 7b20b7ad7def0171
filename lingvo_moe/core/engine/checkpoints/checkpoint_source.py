"""The weights of a checkpoint, read a part of a variable at a time."""

from typing import Any

import numpy as np

from lingvo_moe.core.engine.checkpoints import arrays
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.weights.source import Entry, WeightSource

_OPEN = 4  # variables at the same time
_CACHE = (
    1 << 30
)  # bytes of the chunks of each of these, where chunks have several parts, as a training writes them


class CheckpointSource(WeightSource):
    """The variables of one part of a state, by their paths there.

    Args:
        step: of the checkpoint.
        part: 'theta', or 'ema', the moving average.

    Raises CheckpointError: as Checkpointer.Restore.
    """

    def __init__(self, checkpointer: Checkpointer, step: int, part: str = "theta"):
        self.where = f"{checkpointer.directory}, step {step}"
        self._stored, self._step = checkpointer.Open(step)
        self._part = f"{part}."
        self._arrays: dict[str, Any] = {}  # the variables that are open
        self.entries = {
            name.removeprefix(self._part): Entry(*about)
            for name, about in self._stored.types.items()
            if name.startswith(self._part)
        }

    def Read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        return self.ReadAt(name, (rows,))

    def ReadAt(self, name: str, index: tuple[Any, ...]) -> np.ndarray:
        """The values `variable[index]`. Calls for the same variables should follow one another."""
        self.About(name)
        if name not in self._arrays:
            if len(self._arrays) == _OPEN:
                del self._arrays[next(iter(self._arrays))]
            self._arrays[name] = self._Open(self._part + name)
        array = self._arrays[name]
        return array[index] if isinstance(array, np.ndarray) else array[index].read().result()

    def _Open(self, name: str) -> Any:
        """A variable's array; one that stages of a pipeline pack with others is read at once."""
        written_as, (tensor,) = self._stored.written_as, self._stored.Tensors([name])
        if tensor == name:
            return arrays.open_to_read(self._step, written_as, name, _CACHE)
        packed = arrays.read(self._step, written_as, {tensor: None})
        return self._stored.Variable(name, packed)
