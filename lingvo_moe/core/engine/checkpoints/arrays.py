"""The tensors of a checkpoint: zarr arrays in an OCDBT database of TensorStore, on disk or in a bucket.

Each process writes the shards that are its own into a database below the common one, which then refers to all of them.
So a shard is written once, whatever its replicas, and an array can be read in any parts. Each chunk has a checksum.
"""

import itertools
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from lingvo_moe.core.engine.lowering.specs import dtype_name
from lingvo_moe.core.files.store import MOST, Store, fresh_context

OLD, NEW = 1, 2  # formats: arrays as Orbax wrote them, and as they are written now
_STATE = "state"
DATA = "d/"  # what the names of a database's files of values begin with
_DRIVERS = {OLD: "zarr", NEW: "zarr3"}
_AHEAD = 1 << 30  # bytes that are written, or read, at the same time


@dataclass(frozen=True)
class ArrayPiece:
    """A part of a tensor that this process writes."""

    name: str  # the tensor's name
    shape: tuple[int, ...]  # the tensor's shape
    begin: tuple[int, ...]  # where it lies in the tensor
    chunk: tuple[int, ...]  # the shape of the tensor's parts, which divide it
    values: np.ndarray  # nothing overwrites them

    @property
    def index(self) -> tuple[slice, ...]:
        """The part of the tensor that it is."""
        return tuple(slice(b, b + n) for b, n in zip(self.begin, self.values.shape))


def own_pieces(tensors: Mapping[str, Any]) -> list[ArrayPiece]:
    """The values of the shards that this process is to write: jax.Arrays, or others that NumPy takes, of process 0.

    Of the replicas of a shard, one is written, by whichever process the tensor's name says.
    """
    mine = [
        (name, shard)
        for name, tensor in tensors.items()
        if isinstance(tensor, jax.Array)
        for shard in _own_shards(name, tensor)
    ]
    for _, shard in mine:
        shard.data.copy_to_host_async()
    pieces = []
    for name, shard in mine:
        shape = tensors[name].shape
        values = np.array(shard.data)
        pieces.append(ArrayPiece(name, shape, _begin(shard.index, shape), values.shape, values))
    for name, tensor in tensors.items():
        if not isinstance(tensor, jax.Array) and jax.process_index() == 0:
            # TensorFlow never overwrites a tensor, so that on the host no copy is needed. Without it there is none.
            tensorflow = sys.modules.get("tensorflow")
            is_tensor = tensorflow is not None and isinstance(tensor, tensorflow.Tensor)
            values = np.asarray(tensor) if is_tensor else np.array(tensor)
            pieces.append(ArrayPiece(name, values.shape, (0,) * values.ndim, values.shape, values))
    return pieces


def _own_shards(name: str, tensor: jax.Array) -> Iterator[Any]:
    """The shards of a tensor that this process writes."""
    replicas: dict[tuple[int, ...], list[Any]] = {}
    for device, index in tensor.sharding.devices_indices_map(tensor.shape).items():
        replicas.setdefault(_begin(index, tensor.shape), []).append(device)
    for shard in tensor.addressable_shards:
        begin = _begin(shard.index, tensor.shape)
        devices = sorted(replicas[begin], key=lambda d: d.id)
        if shard.device == devices[zlib.crc32(f"{name}{begin}".encode()) % len(devices)]:
            yield shard


def _begin(index: Iterable[slice], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(part.indices(size)[0] for part, size in zip(index, shape))


def part_of(process: int) -> str:
    """The name of a process's database in a step."""
    return f"{_STATE}/ocdbt.process_{process}"


def write(step: Store, process: int, pieces: list[ArrayPiece]) -> None:
    """Writes the pieces of a process. Raises Exception: what TensorStore raises, e.g. for a full disk."""
    database, context = _database(step, part_of(process)), fresh_context()
    for group in _groups(pieces, lambda piece: piece.values.nbytes):
        # Not in a transaction: tensorstore 0.1.86 sometimes never ended one, and the database joins writes anyway.
        opening = {p.name: _open_to_write(database, p, context) for p in group}
        arrays = {name: future.result() for name, future in opening.items()}
        writes = [arrays[p.name][p.index].write(p.values) for p in group]
        for done in writes:
            done.result()


def _open_to_write(database: Mapping[str, Any], piece: ArrayPiece, context: Any) -> Any:
    """A future of the array that a piece is of."""
    metadata = {
        "shape": piece.shape,
        "data_type": dtype_name(piece.values.dtype),
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [max(1, n) for n in piece.chunk]},
        },
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    }
    spec = {"driver": _DRIVERS[NEW], "kvstore": {**database, "path": f"{piece.name}/"}}
    return ts.open(
        {
            **spec,
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
            "recheck_cached_metadata": False,
        },
        create=True,
        open=True,
        context=context,
    )


def join(step: Store, processes: int) -> None:
    """Makes the database of a step out of those of all processes. Raises Exception as write."""
    context = fresh_context()
    whole = ts.KvStore.open(_database(step, _STATE), context=context).result()
    transaction = ts.Transaction(atomic=True)
    for process in range(processes):
        part = ts.KvStore.open(_database(step, part_of(process)), context=context).result()
        part.experimental_copy_range_to(whole.with_transaction(transaction)).result()
    transaction.commit_async().result()


def _database(step: Store, name: str) -> dict[str, Any]:
    """TensorStore's description of a database in a step."""
    config = {"compression": None, "max_inline_value_bytes": 1024}
    return {
        "driver": "ocdbt",
        "base": step.Spec(name),
        "config": config,
        "target_data_file_size": MOST,
    }


def read(
    step: Store, written_as: int, targets: Mapping[str, jax.ShapeDtypeStruct | None]
) -> dict[str, Any]:
    """Reads the named tensors: as NumPy arrays where the target is None, else sharded as it says.

    `written_as` is the format of the step. Raises Exception as write, and for lack of memory.
    """
    context = fresh_context()
    opening = [_opening(step, written_as, name, context) for name in targets]
    arrays = [future.result() for future in opening]
    values: dict[str, Any] = {}
    for group in _groups(list(zip(targets, arrays)), lambda item: _bytes(item[1])):
        begun = [(name, _begun(array, targets[name])) for name, array in group]
        values |= {name: result() for name, result in begun}
    return values


def open_to_read(step: Store, written_as: int, name: str, cache: int) -> Any:
    """A tensor, parts of which are read by their indices. Of chunks that have several of these, `cache` bytes stay in
    memory while it is open. Raises Exception as read."""
    array = _opening(step, written_as, name, fresh_context()).result()
    if array.chunk_layout.read_chunk.shape[:1] in ((), (1,)):
        return array
    return _opening(step, written_as, name, fresh_context(cache)).result()


def _opening(step: Store, written_as: int, name: str, context: Any) -> Any:
    """A future of an array of a step."""
    base = {"driver": "ocdbt", "base": step.Spec(_STATE)}
    spec = {"driver": _DRIVERS[written_as], "kvstore": {**base, "path": f"{name}/"}}
    return ts.open(spec, open=True, context=context)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.numpy_dtype.itemsize


def _begun(array: Any, target: jax.ShapeDtypeStruct | None) -> Callable[[], Any]:
    """Begins to read an array, each part once, also for several devices; returns what waits for it."""
    if target is None:
        return array.read().result
    shape, sharding = target.shape, target.sharding
    boxes = sharding.addressable_devices_indices_map(shape).values()
    parts = {_begin(index, shape): index for index in boxes}
    reads = {begin: array[index].read() for begin, index in parts.items()}
    return lambda: jax.make_array_from_callback(
        shape, sharding, lambda index: reads[_begin(index, shape)].result()
    )


def _groups(items: Sequence[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Cuts a sequence into lists of about _AHEAD bytes."""
    totals = itertools.accumulate(size(item) for item in items)
    numbered = zip(items, (total // _AHEAD for total in totals))
    for _, group in itertools.groupby(numbered, key=lambda pair: pair[1]):
        yield [item for item, _ in group]
