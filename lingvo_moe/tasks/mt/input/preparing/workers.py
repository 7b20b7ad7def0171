"""Runs the jobs of a stage in several processes, shows how far they are, and stops them at once on Ctrl-C."""

import concurrent.futures
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

Told = Callable[[int], None]
_SHOWN_EVERY = 1.0  # seconds
_counter: Any = None  # of a worker process: what has been done in all of them


def run_jobs(
    function: Callable[[Any, Told], Any],
    jobs: Sequence[Any],
    workers: int,
    show: Callable[[int, int, float], None],
) -> list[Any]:
    """`[function(job, told), ...]`, in order.

    Args:
        function: of a module; calls `told(n)` with how much it has done since the last call.
        jobs: what it is called with.
        workers: processes; with 1, or a single job, this process does the work.
        show: called now and then with the jobs done, what was told in all, and the seconds since the beginning.
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
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_here(function: Callable, jobs: Sequence[Any], show: Callable, begin: float) -> list[Any]:
    total, done, shown = 0, 0, begin

    def told(n: int) -> None:
        nonlocal total, shown
        total += n
        if time.monotonic() - shown > _SHOWN_EVERY:
            shown = time.monotonic()
            show(done, total, shown - begin)

    results = []
    for job in jobs:
        results.append(function(job, told))
        done += 1
    show(done, total, time.monotonic() - begin)
    return results


def _begin(counter: Any) -> None:
    global _counter
    _counter = counter
    # Ctrl-C goes to every process at a terminal; the first one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call(function: Callable, job: Any) -> Any:
    return function(job, _add)


def _add(n: int) -> None:
    with _counter.get_lock():
        _counter.value += n
