"""Checkpoints, one place a step, on disk or in a bucket: sharded, written in the background, complete or absent.

A step holds the state as a flat map from path to tensor (arrays.py), and a JSON file with the structure of the
state and everything else that a run needs to resume (the input's position, the experiment's text). It
can be restored on any mesh, device count, process count or engine, and with any packing of variables
(packed_tensors.py), after its files have been compared with their digests. Steps that older versions wrote by Orbax are
restored too. Imports no TensorFlow.
"""

import contextlib
import copy
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from lingvo_moe.core.engine import devices
from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints import arrays
from lingvo_moe.core.engine.checkpoints.checkpoint_digests import (
    ABOUT,
    NotListedError,
    await_true,
    join_parts,
    verify_step,
    write_part,
)
from lingvo_moe.core.engine.checkpoints.checkpoint_rotation import Rotation
from lingvo_moe.core.engine.checkpoints.number_formats import converted, is_master, sources
from lingvo_moe.core.engine.checkpoints.packed_tensors import PackedLayout, Stored
from lingvo_moe.core.engine.lowering.specs import TensorSpec, numpy_dtype
from lingvo_moe.core.files.manifest import ManifestError
from lingvo_moe.core.files.paths import check_portable
from lingvo_moe.core.files.store import Bucket, Store, is_address, reason_of
from lingvo_moe.core.nested_map import NestedMap, first_difference, flatten_items, pack, skeleton
from lingvo_moe.core.runs.bucket_lock import BucketLock
from lingvo_moe.core.runs.saved_steps import saved_steps

_MOST_SHOWN = 400  # characters of another library's error
_log = logging.getLogger(__name__)


_UNCOMMITTED = "{} has no object COMMIT, so that it is not used; it was just being written, or COMMIT was deleted"


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model."""


class Checkpointer:
    """Saves and restores the states of one run. In a job of several processes all of them make each call.

    Usage:
        with Checkpointer(os.path.join(logdir, "checkpoints"), keep=3) as checkpointer:
            checkpointer.Save(step, state, {"input": ...})
            state, extra = checkpointer.Restore(state_specs, engine)

    Attributes:
        rotation: says which steps stay from the next Save on.
    """

    def __init__(
        self,
        directory: str,
        keep: int = 3,
        read_only: bool = False,
        lock: BucketLock | None = None,
    ):
        """
        Args:
            directory: or an address; made when missing.
            keep: how many of the newest steps stay.
            read_only: whether to leave it untouched.
            lock: held by process 0 for this address or one above; None: an address is locked here.

        Only one writer at a time may use a directory: a new one deletes the incomplete files of a
        killed writer.

        Raises:
            CheckpointError: reading only, and there is no such directory.
            RunLockError: another process writes at this address.
            OSError: e.g. StoreError, where a bucket cannot be used.
            PathError: a path below which checkpoints could not be read again.
        """
        self.directory = os.fspath(directory)
        if not is_address(directory):
            check_portable(directory, "the directory of checkpoints")
            self.directory = os.path.abspath(directory)
        self.rotation = Rotation(keep)
        self._steps, self._verified = saved_steps(self.directory), set[int]()
        self._saved: set[int] | None = None  # what is there, or on its way, for a writer
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1)
        self._lock, self._own_lock = lock, lock is None
        if read_only:
            if not self._steps.Steps() and not os.path.isdir(self.directory):
                raise CheckpointError(
                    f"{self.directory}: there is no such directory of checkpoints"
                )
            uncommitted = self._steps.Uncommitted()
        else:
            uncommitted = self._begin()
        for step in uncommitted:
            _log.warning("%s", _UNCOMMITTED.format(self._steps.Place(step).address))

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.Close()

    def _begin(self) -> list[int]:
        """Makes the directory, without what killed writers left, before any process writes."""
        uncommitted = []
        if jax.process_index() == 0:
            if isinstance(self._steps.store, Bucket):
                self._lock = self._lock or BucketLock(self._steps.store)
            else:
                os.makedirs(self.directory, exist_ok=True)
            uncommitted, leftovers = self._steps.Uncommitted(), self._steps.Leftovers()
            self._renew_lock()  # by now, what was listed is older than whoever takes the lock over
            self._steps.Clear(leftovers)
        writer = devices.from_first_process(self._steps.writer.encode())  # the others wait
        self._steps.writer = writer.decode()
        self._saved = set(self._steps.Steps())
        return uncommitted

    def Steps(self) -> list[int]:
        """The steps that are complete, oldest first."""
        return self._steps.Steps()

    def LatestStep(self) -> int | None:
        """The newest complete step, or None."""
        steps = self.Steps()
        return steps[-1] if steps else None

    def Save(
        self,
        step: int,
        state: Any,
        extra: Mapping[str, Any] | None = None,
        packing: PackedLayout | None = None,
    ) -> None:
        """Starts to save; the state may be donated as soon as this returns. A step that is there already is left alone.

        `extra` is anything that JSON can hold; `packing` is that of the state, None where it packs nothing.

        Raises:
            CheckpointError: this step, or the one before it, could not be written.
        """
        assert self._saved is not None, "opened to read only"
        if step in self._saved:
            return
        self.Wait()
        tensors = dict(flatten_items(state))
        packing = packing or PackedLayout(state, {})
        about = packing.About(tensors, arrays.NEW, extra or {})
        with self._writing():
            pieces = arrays.own_pieces(tensors)
            self._saved.add(step)
            stays = copy.copy(self.rotation)  # as it is now, whenever the step is complete
            self._pending = self._thread.submit(self._write, step, pieces, about, stays)

    def _write(
        self, step: int, pieces: list[arrays.ArrayPiece], about: Mapping[str, Any], stays: Rotation
    ) -> None:
        """Writes what this process has of a step; process 0 completes it, and deletes those that make place."""
        steps, process = self._steps, jax.process_index()
        self._renew_lock()
        write_part(steps.Part(step), process, pieces)
        pieces.clear()  # frees memory
        if process:
            await_true(lambda: steps.Has(step))
            return
        digest = join_parts(steps.Part(step), jax.process_count(), about, self._renew_lock)
        if self._lock:
            self._lock.Check()
        if not steps.Complete(step, digest):
            raise RuntimeError(f"step {step} was saved by another writer at the same time")
        for old in stays.Leaving(steps.Steps()):
            self._renew_lock()
            steps.Delete(old)

    def _renew_lock(self) -> None:
        """Raises RunLockError where another writer has taken this one for dead; StoreError."""
        if self._lock:
            self._lock.Renew()

    def Restore(
        self,
        state_specs: Any,
        engine: Engine,
        step: int | None = None,
        packing: PackedLayout | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Restores the state on the engine's devices, sharded as the specs say, and the `extra` of Save.

        Tensors that the checkpoint packs differently pass through the memory of every process, one at a time. Those
        that it has in another number format are converted.

        Args:
            state_specs: a tree of specs of the whole state, or of a part such as
                NestedMap(theta=...).
            packing: of `state_specs`; None: they pack nothing.

        Raises:
            CheckpointError: no such step; a damaged one; or one of another model (the message names
                the first variable that differs).
        """
        step, about = self._about(step, engine)
        packing, stored = packing or PackedLayout(state_specs, {}), Stored(about)
        self._check_model(step, about, packing)
        specs = [TensorSpec.Of(spec, path) for path, spec in flatten_items(state_specs)]
        there = sources(specs, stored.types)
        tensors = self._read_onto(step, stored, there, engine, packing)
        if there != specs:
            tensors = converted(tensors, specs, engine)
        return pack(skeleton(state_specs), tensors), about["extra"]

    def RestoreTensors(
        self,
        specs: Sequence[TensorSpec],
        engine: Engine,
        step: int | None = None,
        packing: PackedLayout | None = None,
    ) -> list[Any]:
        """Restores some tensors of the state, named by their paths, on the devices with their specs' sharding.

        Args: as those of Restore; `packing` is that of a tree that has these tensors.

        Raises:
            CheckpointError: as Restore.
        """
        step, about = self._about(step, engine)
        stored, packing = Stored(about), packing or PackedLayout({}, {})
        self._check_tensors(step, stored, packing.Unpacked(specs))
        return self._read_onto(step, stored, specs, engine, packing)

    def RestoreToNumpy(
        self, prefix: str = "", step: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A part of the state, e.g. prefix='theta', as NumPy arrays in the structure that was saved, and the `extra`.

        Raises CheckpointError: as Restore; or nothing has that prefix.
        """
        step, about = self._about(step)
        try:
            structure = NestedMap.FromNestedDict(about["structure"])
            part = structure.GetItem(prefix) if prefix else structure
        except KeyError as e:
            raise CheckpointError(f"{self._where(step)}: {e.args[0]}") from None
        names = [v["name"] for v in about["variables"]]
        wanted = {number: names[number] for _, number in flatten_items(part)}
        stored = Stored(about)
        tensors = self._read_numpy(step, stored, stored.Tensors(wanted.values()))
        leaves = {i: stored.Variable(name, tensors) for i, name in wanted.items()}
        return pack(part, leaves), about["extra"]

    def RestoreMeanToNumpy(self, prefix: str, steps: Sequence[int]) -> Any:
        """The mean over several steps of a part of the state, e.g. prefix='theta', as NumPy arrays.

        Floating-point tensors are averaged in float32, or in their own type if it is wider, and keep their type.
        Other tensors are taken from the last step. Memory holds the running mean and the step that is being read.

        Raises:
            CheckpointError: as Restore; or nothing has that prefix.
        """
        for number, step in enumerate(steps, 1):
            tree, _ = self.RestoreToNumpy(prefix, step)
            leaves = [leaf for _, leaf in flatten_items(tree)]
            if number == 1:
                types = [leaf.dtype for leaf in leaves]
                mean = [_wide(leaf) for leaf in leaves]
            for i, leaf in enumerate(leaves):
                mean[i] = mean[i] + (leaf - mean[i]) / number if _is_float(leaf) else leaf
        return pack(skeleton(tree), [m.astype(t) for m, t in zip(mean, types, strict=True)])

    def Open(self, step: int | None = None) -> tuple[Stored, Store]:
        """The places of a step's tensors, and the store to read them from. Raises CheckpointError as Restore."""
        step, about = self._about(step)
        return Stored(about), self._steps.Of(step)

    def ReadExtra(self, step: int | None = None) -> dict[str, Any]:
        """The `extra` of Save alone. Raises CheckpointError as Restore."""
        return self._about(step)[1]["extra"]

    def Wait(self) -> None:
        """Returns when everything that was saved is complete on disk.

        Raises:
            CheckpointError: something could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._writing():
                pending.result()

    def Close(self) -> None:
        """Waits, and releases the directory. Raises CheckpointError as Wait."""
        try:
            self.Wait()
        finally:
            self._thread.shutdown()
            if self._lock and self._own_lock:
                self._lock.Close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns exceptions, as of TensorStore about a full or read-only disk, into one line."""
        try:
            yield
        except Exception as e:
            raise CheckpointError(
                f"{self.directory}: a checkpoint could not be written ({_in_one_line(e)}); the ones before it are "
                "whole, and the same command goes on from the newest"
            ) from e

    def _where(self, step: int) -> str:
        return f"{self.directory}, step {step}"

    def _about(self, step: int | None, engine: Engine | None = None) -> tuple[int, dict[str, Any]]:
        """The step, the newest for None, and its JSON, once its files are verified; by all processes of an engine."""
        if step is None:
            steps = self.Steps()
            if not steps:
                raise CheckpointError(f"{self.directory}: there is no checkpoint")
            step = steps[-1]
        self._verify(step, engine)
        with self._guarded(step):
            about = json.loads(self._steps.Of(step).Read(ABOUT))
        if about.get("format") not in (arrays.OLD, arrays.NEW):
            raise CheckpointError(f"{self._where(step)}: format {about.get('format')} is unknown")
        return step, about

    def _verify(self, step: int, engine: Engine | None) -> None:
        """Checks once that a step is there, and its files' digests; all processes of an engine raise if one does."""
        if step in self._verified:
            return
        part = (jax.process_index(), jax.process_count()) if engine else (0, 1)
        mistake: CheckpointError | None = None
        try:
            if step not in (steps := self.Steps()):
                there = f"there are {steps}" if steps else "there is none"
                raise CheckpointError(f"{self._where(step)}: there is no such checkpoint; {there}")
            self._verify_files(step, part)
        except CheckpointError as e:
            mistake = e
        failed = mistake is not None
        if engine.AnyProcess(failed) if engine else failed:
            raise mistake or CheckpointError(
                f"{self._where(step)}: another process of the job cannot use the checkpoint; its error says why"
            )
        self._verified.add(step)

    def _verify_files(self, step: int, part: tuple[int, int] = (0, 1)) -> None:
        """Raises CheckpointError if files of a step are damaged or cannot be read."""
        try:
            verify_step(self._steps, step, part)
        except NotListedError as e:
            raise CheckpointError(f"{self._where(step)}: {e}") from None
        except ManifestError as e:
            raise self._damaged(step, e) from e
        except OSError as e:
            raise CheckpointError(f"{self._where(step)}: cannot be read: {e}") from e

    def _damaged(self, step: int, reason: ManifestError) -> CheckpointError:
        """The error for a damaged step, which suggests the newest undamaged step before it."""
        for older in reversed([s for s in self.Steps() if s < step]):
            try:
                verify_step(self._steps, older)
            except (ManifestError, OSError):
                continue
            place = self._steps.Place(step).address
            advice = (
                f"delete {place} to go on from step {older}, whose files are as they were written"
            )
            break
        else:
            in_bucket = isinstance(self._steps.store, Bucket)  # where --restart moves nothing aside
            again = "at another address" if in_bucket else "with --restart"
            advice = f"no older checkpoint is whole: begin again, {again}"
        return CheckpointError(
            f"{self._where(step)}: the checkpoint is damaged; {advice} ({reason})"
        )

    @contextlib.contextmanager
    def _guarded(self, step: int) -> Iterator[None]:
        """Reads from a step that was verified.

        Raises CheckpointError: it was damaged since, or TensorStore fails, e.g. for lack of memory.
        """
        try:
            yield
        except Exception as e:
            self._verify_files(step)
            raise CheckpointError(
                f"{self._where(step)}: the checkpoint could not be restored ({_in_one_line(e)}); its files are as they "
                "were written"
            ) from e

    def _read(
        self, step: int, stored: Stored, targets: Mapping[str, jax.ShapeDtypeStruct | None]
    ) -> dict[str, Any]:
        with self._guarded(step):
            return arrays.read(self._steps.Of(step), stored.written_as, targets)

    def _read_numpy(self, step: int, stored: Stored, names: Iterable[str]) -> dict[str, np.ndarray]:
        return self._read(step, stored, dict.fromkeys(names))

    def _read_onto(
        self,
        step: int,
        stored: Stored,
        specs: Sequence[TensorSpec],
        engine: Engine,
        packing: PackedLayout,
    ) -> list[Any]:
        """The tensors of these specs, which have been checked, on the engine's devices."""
        there = [s for s in specs if stored.Has(s, packing)]
        arrays_by_name = self._read(step, stored, {s.name: _sharded(s, engine) for s in there})
        put = engine.Put([arrays_by_name[s.name] for s in there], there)
        tensors = {s.name: value for s, value in zip(there, put, strict=True)}
        others = [s for s in specs if s.name not in tensors]
        tensors |= self._repacked(step, stored, others, engine, packing)
        return [tensors[s.name] for s in specs]

    def _repacked(
        self,
        step: int,
        stored: Stored,
        specs: Sequence[TensorSpec],
        engine: Engine,
        packing: PackedLayout,
    ) -> dict[str, Any]:
        """Reads, as _read_onto does, tensors whose variables the checkpoint holds in tensors of another packing."""
        variables = {s.name: packing.Variables(s.name) for s in specs}
        sources = {name: stored.Tensors(names) for name, names in variables.items()}
        packed: dict[str, Any] = {}
        tensors: dict[str, np.ndarray] = {}
        for spec in sorted(specs, key=lambda s: sources[s.name]):
            needed = sources[spec.name]
            tensors = {name: tensors[name] for name in needed if name in tensors}
            if missing := [name for name in needed if name not in tensors]:
                tensors |= self._read_numpy(step, stored, missing)
            values = {name: stored.Variable(name, tensors) for name in variables[spec.name]}
            packed[spec.name] = engine.Put([packing.Packed(spec, values)], [spec])[0]
        return packed

    def _check_model(self, step: int, about: dict[str, Any], packing: PackedLayout) -> None:
        specs = [TensorSpec.Of(spec, path) for path, spec in flatten_items(packing.unpacked)]
        roots = {re.split(r"[.\[]", s.name)[0] for s in specs}
        saved = [v["name"] for v in about["variables"] if not is_master(v["name"])]
        names = [n for n in saved if re.split(r"[.\[]", n)[0] in roots]
        wanted = [s.name for s in specs if not is_master(s.name)]
        if names != wanted:
            raise self._another_model(step, f"{first_difference(wanted, names)} in it")
        stored = Stored(about)
        self._check_tensors(step, stored, sources(specs, stored.types))

    def _check_tensors(self, step: int, stored: Stored, specs: Sequence[TensorSpec]) -> None:
        for spec in specs:
            if spec.name not in stored.types:
                raise self._another_model(step, f"{spec.name!r} is missing in it")
            shape, dtype = stored.types[spec.name]
            if (shape, dtype) != (spec.shape, spec.dtype):
                there, here = f"{dtype}{list(shape)}", f"{spec.dtype}{list(spec.shape)}"
                raise self._another_model(step, f"{spec.name} is {there} in it, {here} here")

    def _another_model(self, step: int, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where(step)}: the checkpoint is of another model: {what}")


def _in_one_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {reason_of(error)}"
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[: _MOST_SHOWN // 2]} ... {text[-_MOST_SHOWN // 2 :]}"


def _is_float(array: np.ndarray) -> bool:
    return bool(jax.numpy.issubdtype(array.dtype, np.floating))  # knows bfloat16 too


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.result_type(array, np.float32)) if _is_float(array) else array


def _sharded(spec: TensorSpec, engine: Engine) -> jax.ShapeDtypeStruct | None:
    """The form in which a tensor is read onto an engine's devices at once; None: as NumPy, for Engine.Put."""
    sharding = engine.Sharding(spec)
    return sharding and jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype), sharding=sharding)
