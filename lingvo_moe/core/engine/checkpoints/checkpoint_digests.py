"""Digests of a checkpoint's files: written before the checkpoint is complete, verified before it is used.

Each process lists the files that it wrote, as it reads them back; process 0 joins the lists, and then completes the
step. So every complete step has its list, whenever a process was killed. Changes before a file is read back are found
by the checksums of the arrays' chunks alone.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from lingvo_moe.core.engine.checkpoints import arrays
from lingvo_moe.core.files.manifest import (
    XXH128,
    ManifestError,
    digest_of,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from lingvo_moe.core.files.store import Store
from lingvo_moe.core.job.lost import LOST
from lingvo_moe.core.runs.saved_steps import COMMIT, LIST, SavedSteps

ABOUT = "about/metadata"
_PART = "part.xxh128"  # the list of what one process wrote
_POLL = 0.2  # seconds


class NotListedError(ManifestError):
    """A step without a list of digests, so that damage could not be detected."""


def write_part(step: Store, process: int, pieces: list[arrays.ArrayPiece]) -> None:
    """Writes and lists what a process has of a step, maybe nothing. Raises Exception: as arrays.write, or OSError."""
    arrays.write(step, process, pieces)
    list_part(step, process, None if pieces else ())  # without a piece there is no directory yet


def list_part(
    step: Store,
    process: int,
    files: Iterable[str] | None = None,
    digests: Mapping[str, str] | None = None,
) -> None:
    """Lists what a process has written; None: all of it. Files of known digests are not read. Raises OSError."""
    write_manifest(step.Below(arrays.part_of(process)), _PART, files, XXH128, digests)


def add_digests(step: Store, process: int, digests: dict[str, str]) -> None:
    """Adds those of the files of arrays that a process has written since, which never change. Raises OSError."""
    part = step.Below(arrays.part_of(process))
    for name in part.List():
        if name.startswith(arrays.DATA) and name not in digests:
            digests[name] = digest_of(part, name, XXH128)


def join_parts(
    step: Store, processes: int, about: Mapping[str, Any], renew: Callable[[], None]
) -> str:
    """Waits for the parts of all processes, joins them, and lists all files of the step with its JSON.

    `renew` is called while it waits: the parts may have been deleted by another writer.

    Returns the digest of the list. Raises Exception: as write_part, and as `renew`.
    """
    digests: dict[str, str] = {}
    for process in range(processes):
        name = arrays.part_of(process)
        part = step.Below(name)
        await_true(partial(_has_part, part, renew))
        digests |= {f"{name}/{path}": d for path, d in read_manifest(part, _PART).items()}
    arrays.join(step, processes)
    step.Write(ABOUT, json.dumps(about).encode())
    write_manifest(step, LIST, digest=XXH128, digests=digests)
    return _digest(step)


def _has_part(part: Store, renew: Callable[[], None]) -> bool:
    if there := part.Has(_PART):
        return there
    renew()
    return False


def await_true(condition: Callable[[], bool]) -> None:
    """Waits for something that another process does. Where that one fails, the job ends (core/job/ending.py).

    Raises LostError: a process of an elastic job is gone.
    """
    while not condition():
        LOST.Check()
        time.sleep(_POLL)


def verify_step(steps: SavedSteps, step: int, part: tuple[int, int] = (0, 1)) -> None:
    """Compares the files of a step with their digests.

    `part` (i, n): this process takes the i-th share of n.

    Raises:
        NotListedError: there is no list.
        ManifestError: names the file that is damaged or missing, or was added.
        OSError: a file cannot be read.
    """
    files = steps.Of(step)
    if not files.Has(LIST):
        raise NotListedError(
            f"{LIST}, the list of its files, is missing, so damage cannot be detected: the list was deleted, or "
            "the checkpoint is by an older version; if you know that the files are undamaged, docs/security.md has the "
            "command that lists them again"
        )
    verify_manifest(files, LIST, remedy="restore it from a copy", part=part, beside=(COMMIT,))
    steps.CheckCommit(step, _digest(files))


def _digest(step: Store) -> str:
    return hashlib.sha256(step.Read(LIST)).hexdigest()
