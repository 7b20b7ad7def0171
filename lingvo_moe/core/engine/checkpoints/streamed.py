"""Writes a checkpoint from values that come one after another, in little memory, and goes on where it was killed.

Its files lie in a directory of their own until it is complete. A text file beside them lists what is written already.
A thread writes some values, and reads the files back for their digests, while the next values come.
"""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from lingvo_moe.core.engine.checkpoints import arrays
from lingvo_moe.core.engine.checkpoints.checkpoint_digests import add_digests, join_parts, list_part
from lingvo_moe.core.engine.checkpoints.packed_tensors import PackedLayout
from lingvo_moe.core.engine.lowering.specs import TensorSpec, numpy_dtype
from lingvo_moe.core.nested_map import NestedMap, flatten_items
from lingvo_moe.core.runs.run_lock import IMPORTING
from lingvo_moe.core.runs.saved_steps import StepsOnDisk

_AT_ONCE = 64 << 20  # bytes that are collected before they are written
_DIGESTED = 1 << 30  # bytes between two lists of files for their digests: there may be thousands
_LIST = "written.txt"


class StreamedCheckpoint:
    """A checkpoint that is being written at `directory`/importing, to become a step in `directory`/checkpoints.

    It is a context, which ends when nothing is being written any more.

    Args:
        directory: a run's.
        specs: of the whole state, e.g. NestedMap(theta=...).
        identity: a line that says what is written; what was begun with another one is begun again.

    Attributes:
        written: the names of the parts that are on disk.
    """

    def __init__(self, directory: Path, specs: NestedMap, identity: str):
        self._place, self._run = directory / IMPORTING, directory
        self._specs = {path: TensorSpec.Of(spec, path) for path, spec in flatten_items(specs)}
        self._tree, self._store = specs, StepsOnDisk(self._place).Part(0)
        self._pending: list[arrays.ArrayPiece] = []
        self._names: list[str] = []
        self._writer, self._writing = ThreadPoolExecutor(1), Future[None]()
        self._writing.set_result(None)
        self._digests = dict[str, str]()  # those of files that were written, which never change
        self._undigested = 0  # bytes written since
        self._list = self._place / _LIST
        # A line that was cut, as the process ended, says nothing.
        lines = self._list.read_text().split("\n")[:-1] if self._list.is_file() else []
        if lines[:1] != [identity]:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place.mkdir(parents=True)
            self._list.write_text(f"{identity}\n")
            lines = [identity]
        self.written = set(lines[1:])

    def __enter__(self) -> "StreamedCheckpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.shutdown()

    def Write(
        self, path: str, begin: tuple[int, ...], chunk: tuple[int, ...], values: np.ndarray
    ) -> None:
        """Adds values of a variable, which become of its type.

        Args:
            path: the variable's.
            begin: where they lie in it.
            chunk: the shape of the boxes into which all parts cut it; theirs, but for the last one's.
            values: of that shape, but for dimensions of 1 before them.
        """
        self._FlushMuch()
        spec = self._specs[path]
        shape = (*(1 for _ in range(len(chunk) - values.ndim)), *values.shape)
        cast = np.ascontiguousarray(values, numpy_dtype(spec.dtype)).reshape(shape)
        self._pending.append(arrays.ArrayPiece(path, spec.shape, begin, chunk, cast))

    def Written(self, name: str) -> None:
        """Says that what was added since the last name is all of a part of this name."""
        self._names.append(name)
        self._FlushMuch()

    def _FlushMuch(self) -> None:
        if sum(piece.values.nbytes for piece in self._pending) >= _AT_ONCE:
            self._Flush()

    def _Flush(self) -> None:
        """Begins to write what was added, once what was added before is written. Raises what that raised."""
        self._writing.result()
        self._writing = self._writer.submit(self._Put, self._pending, self._names)
        self._pending, self._names = [], []

    def _Put(self, pieces: list[arrays.ArrayPiece], names: list[str]) -> None:
        arrays.write(self._store, 0, pieces)
        with open(self._list, "a") as file:
            file.writelines(f"{name}\n" for name in names)
            file.flush()
            os.fsync(file.fileno())
        self.written |= {*names}
        self._undigested += sum(piece.values.nbytes for piece in pieces)
        if self._undigested >= _DIGESTED:
            add_digests(self._store, 0, self._digests)
            self._undigested = 0

    def Finish(self, step: int) -> None:
        """Makes the checkpoint complete, as the step."""
        self._Flush()
        self._writing.result()
        list_part(self._store, 0, digests=self._digests)
        about = PackedLayout(self._tree, {}).About({}, arrays.NEW, {})
        join_parts(self._store, 1, about, lambda: None)
        checkpoints = self._run / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        os.rename(self._place / "0.part", checkpoints / str(step))
        shutil.rmtree(self._place)
