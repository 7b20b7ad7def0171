"""Writes a checkpoint from values that come one after another, in little memory, and goes on where it was killed.

Its files lie in a directory of their own until it is complete. A text file beside them lists what is written already.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_moe.core.engine.checkpoints import arrays
from lingvo_moe.core.engine.checkpoints.checkpoint_digests import join_parts, list_part
from lingvo_moe.core.engine.checkpoints.packed_tensors import PackedLayout
from lingvo_moe.core.engine.lowering.specs import TensorSpec, numpy_dtype
from lingvo_moe.core.nested_map import NestedMap, flatten_items, skeleton
from lingvo_moe.core.runs.saved_steps import StepsOnDisk

_AT_ONCE = 100 << 20  # bytes that are collected before they are written
_PLACE, _LIST = "importing", "written.txt"


def is_begun(directory: str | os.PathLike) -> bool:
    """Whether a checkpoint of a run is being written, or was when its writer was killed."""
    return (Path(directory) / _PLACE / _LIST).is_file()


class StreamedCheckpoint:
    """A checkpoint that is being written at `directory`/importing, to become a step in `directory`/checkpoints.

    Args:
        directory: a run's.
        specs: of the whole state, e.g. NestedMap(theta=...).
        identity: a line that says what is written; what was begun with another one is begun again.

    Attributes:
        written: the names of the parts that are on disk.
    """

    def __init__(self, directory: Path, specs: NestedMap, identity: str):
        self._place, self._run = directory / _PLACE, directory
        self._specs = {path: TensorSpec.Of(spec, path) for path, spec in flatten_items(specs)}
        self._tree, self._store = specs, StepsOnDisk(self._place).Part(0)
        self._pending: list[arrays.ArrayPiece] = []
        self._names: list[str] = []
        self._list = self._place / _LIST
        lines = self._list.read_text().splitlines() if self._list.is_file() else []
        if lines[:1] != [identity]:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place.mkdir(parents=True)
            self._list.write_text(f"{identity}\n")
            lines = [identity]
        self.written = set(lines[1:])

    def Write(self, name: str, values: Iterable[tuple[str, tuple[int, ...], np.ndarray]]) -> None:
        """Adds a part: for each (variable, index, values) the values of `variable[index]`, in the variable's type."""
        for path, index, part in values:
            spec = self._specs[path]
            shape = (*(1 for _ in index), *spec.shape[len(index) :])
            begin = (*index, *(0 for _ in spec.shape[len(index) :]))
            cast = np.ascontiguousarray(part.astype(numpy_dtype(spec.dtype), copy=False))
            piece = arrays.ArrayPiece(path, spec.shape, begin, shape, cast.reshape(shape))
            self._pending.append(piece)
        self._names.append(name)
        if sum(piece.values.nbytes for piece in self._pending) >= _AT_ONCE:
            self._Flush()

    def _Flush(self) -> None:
        arrays.write(self._store, 0, self._pending)
        with open(self._list, "a") as file:
            file.writelines(f"{name}\n" for name in self._names)
            file.flush()
            os.fsync(file.fileno())
        self.written |= {*self._names}
        self._pending, self._names = [], []

    def Finish(self, step: int, extra: Mapping[str, Any]) -> None:
        """Makes the checkpoint complete, as the step."""
        self._Flush()
        list_part(self._store, 0)
        about = {
            "format": arrays.NEW,
            **PackedLayout(self._tree, {}).About({}),
            "structure": skeleton(self._tree),
            "extra": dict(extra),
        }
        join_parts(self._store, 1, about, lambda: None)
        checkpoints = self._run / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        os.rename(self._place / "0.part", checkpoints / str(step))
        shutil.rmtree(self._place)
