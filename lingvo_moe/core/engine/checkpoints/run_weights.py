"""The weights of a run at a checkpoint: as the last step left them, or their moving average."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
from lingvo_moe.core.engine.lowering.specs import numpy_dtype
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.saved_steps import saved_steps
from lingvo_moe.core.task.base_task import BaseTask

_PATIENCE = 5.0  # seconds that a trainer may take to delete the files of a checkpoint
_T = TypeVar("_T")


@dataclass(frozen=True)
class Chosen:
    """The choice of the weights that are read from a run."""

    step: int | None = None  # the checkpoint's step; None for the newest
    average_last: int = 1  # how many checkpoints, this one the last, to take the mean of
    # Whether the moving average of the weights is read, of a run with task.ema_decay.
    use_ema: bool = False


NEWEST = Chosen()


def read_newest(
    directory: str | os.PathLike, read: Callable[[Checkpointer, int], _T], step: int | None = None
) -> _T:
    """Returns the result of `read` for a checkpoint, also while a trainer deletes old ones.

    Args:
        read: called with what reads them and the step; again with the next newest step if that one was deleted.
        step: the one to read; None for the newest.

    Raises:
        CheckpointError: there is no checkpoint; or as `read`, also where `step` was deleted.
    """
    while True:
        with Checkpointer(os.fspath(directory), read_only=True) as checkpointer:
            chosen = checkpointer.LatestStep() if step is None else step
            if chosen is None:
                raise CheckpointError(f"{checkpointer.directory}: there is no checkpoint")
            try:
                return read(checkpointer, chosen)
            except CheckpointError:
                if step is not None or not was_deleted(directory, chosen):
                    raise


def was_deleted(directory: str | os.PathLike, step: int) -> bool:
    """Whether a checkpoint has made place for newer ones; waits while its files are being deleted."""
    until = time.monotonic() + _PATIENCE
    while step in (there := saved_steps(directory).Steps()):
        if there[-1] == step or time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def read_weights(
    checkpointer: Checkpointer, task: BaseTask, step: int | None = None, use_ema: bool = False
) -> NestedMap:
    """Reads theta as NumPy arrays, in the structure of `task.Unpacked()`.

    Those of the newest checkpoint without a `step`; with `use_ema` their moving average, in the types of the weights.

    Raises:
        CheckpointError: as Checkpointer.Restore; or the run keeps no moving average.
    """
    if not use_ema:
        return checkpointer.RestoreToNumpy("theta", step)[0]
    check_average(checkpointer, task.p)
    average, _ = checkpointer.RestoreToNumpy("ema", step)
    types = {path: spec.dtype for path, spec in task.Unpacked().VariableSpecs().FlattenItems()}
    return average.Pack(
        [np.asarray(x, numpy_dtype(types.get(path, x.dtype))) for path, x in average.FlattenItems()]
    )


def check_average(checkpointer: Checkpointer, task: Params) -> None:
    """Raises CheckpointError where a run of a task with these Params keeps no moving average of its weights."""
    if not task.ema_decay:
        raise CheckpointError(
            f"--use_ema: the run in {checkpointer.directory} keeps no moving average of its weights; train one with "
            "task.ema_decay=0.999, or leave the flag out"
        )
