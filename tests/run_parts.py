"""Runs the parts of `make test`, a few at a time, each in a process that starts with TensorFlow imported.

    python -m tests.run_parts JOBS PART... -- PYTEST_ARGS...

A part is `lint`, or words for pytest; it fails too if a process of it held more than 4 GB. The processes are forks of
this one, so that TensorFlow, JAX and the trainer are imported once for all, which takes some seconds. The output of a
part is shown when it ends.
"""

import functools
import gc
import glob
import importlib
import os
import subprocess
import sys
import tempfile
from typing import IO

import pytest

from lingvo_moe.core.console.tensorflow_import import import_tensorflow
from tests import environment

_LINT = "lint"
_MOST_GIGABYTES = 4  # resident in a process
_NOTHING_SELECTED = 5  # the status of pytest where arguments of the user select no test


@functools.cache
def _import_once() -> None:
    environment.set_up()
    import_tensorflow()
    for name in ("jax", "tensorflow_text", "lingvo_moe.trainer"):
        importlib.import_module(name)
    gc.freeze()


def _status_of(part: str, more: list[str]) -> int:
    if part == _LINT:
        return subprocess.call(["make", "--no-print-directory", _LINT])
    words = [path for word in part.split() for path in sorted(glob.glob(word)) or [word]]
    status = int(pytest.main(["--durations=5", *words, *more]))
    return 0 if more and status == _NOTHING_SELECTED else status


def _started(part: str, more: list[str], log: IO[bytes]) -> int:
    """The number of a new process that runs a part and writes into `log`."""
    if part != _LINT:
        _import_once()
    if process := os.fork():
        return process
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.exit(_status_of(part, more))


def main(jobs: int, parts: list[str], more: list[str]) -> int:
    """Returns 0 if all parts passed."""
    waiting, running, failed = parts[::-1], dict[int, tuple[str, IO[bytes]]](), list[str]()
    while waiting or running:
        while waiting and len(running) < jobs:
            part, log = waiting.pop(), tempfile.TemporaryFile()  # noqa: SIM115
            running[_started(part, more, log)] = part, log
        process, status, used = os.wait4(-1, 0)
        part, log = running.pop(process)
        log.seek(0)
        gigabytes = used.ru_maxrss * 1024 / 1e9
        said = log.read().decode(errors="replace")
        print(f"== {part}\n{said}its largest process held {gigabytes:.1f} GB", flush=True)
        if status:
            failed.append(part)
        elif gigabytes > _MOST_GIGABYTES:
            failed.append(
                f"{part}: a process may hold {_MOST_GIGABYTES} GB; make it two parts in Makefile"
            )
    for part in failed:
        print(f"failed: {part}")
    return int(bool(failed))


if __name__ == "__main__":
    at = sys.argv.index("--")
    sys.exit(main(max(1, int(sys.argv[1])), sys.argv[2:at], sys.argv[at + 1 :]))
