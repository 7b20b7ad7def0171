"""Runs the jobs of a stage in several processes, shows their progress, and stops them at once on Ctrl-C."""

import concurrent.futures
import concurrent.futures.process
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lingvo_moe.tasks.text.data.errors import DataError

Told = Callable[[int], None]
_SHOWN_EVERY = 1.0  # seconds
_counter: Any = None  # of a worker process: what has been done in all of them


def run_jobs(
    function: Callable[[Any, Told], Any],
    jobs: Sequence[Any],
    workers: int,
    show: Callable[[int, int, float], None],
) -> list[Any]:
    """Returns `[function(job, report), ...]`, in order.

    Args:
        function: a function of a module; it calls `report(n)` with the amount of work since the last call.
        workers: processes; with 1, or a single job, this process does the work.
        show: called regularly with the jobs done, the work reported in all, and the seconds since the beginning.

    Raises:
        DataError: a worker process was killed; and what `function` raises.
    """
    begin = time.monotonic()
    if workers < 2 or len(jobs) < 2:
        return _run_here(function, jobs, show, begin)
    # spawn: a fork of a process that runs threads (TensorFlow's) can hang
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    before = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers, len(jobs)), context, initializer=_begin, initargs=(counter,)
    )
    try:
        with _ctrl_c_waits():
            futures = [pool.submit(_call, function, job) for job in jobs]
        waiting: set = set(futures)
        while waiting:
            finished, waiting = concurrent.futures.wait(
                waiting, _SHOWN_EVERY, concurrent.futures.FIRST_EXCEPTION
            )
            for future in finished:
                future.result()
            show(len(jobs) - len(waiting), counter.value, time.monotonic() - begin)
        return [future.result() for future in futures]
    except BaseException as e:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        if isinstance(e, concurrent.futures.process.BrokenProcessPool):
            raise DataError(
                f"one of {workers} worker processes was killed, as happens where memory runs out; the same command"
                " goes on, perhaps with fewer --workers"
            ) from e
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_here(function: Callable, jobs: Sequence[Any], show: Callable, begin: float) -> list[Any]:
    total, done, shown = 0, 0, begin

    def report(n: int) -> None:
        nonlocal total, shown
        total += n
        if time.monotonic() - shown > _SHOWN_EVERY:
            shown = time.monotonic()
            show(done, total, shown - begin)

    results = []
    for job in jobs:
        results.append(function(job, report))
        done += 1
    show(done, total, time.monotonic() - begin)
    return results


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Ctrl-C goes to every process at a terminal. Those that start within leave it to the first, which stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(counter: Any) -> None:
    global _counter
    _counter = counter
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """However the first process goes: nobody takes what this one makes then, and the next run would meet it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _call(function: Callable, job: Any) -> Any:
    return function(job, _add)


def _add(n: int) -> None:
    with _counter.get_lock():
        _counter.value += n
