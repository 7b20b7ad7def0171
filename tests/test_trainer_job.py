"""A job of two real processes, of which one fails: both end soon, with a status and a message."""

import contextlib
import re
import subprocess
import time

import pytest
from processes import free_address, start_python

# The trainer, but for data and training: what it does at each place is to fail there, or to wait for the other process.
_TRAINER = """
import contextlib, sys, time
from jax.experimental import multihost_utils
from lingvo_moe import trainer
from lingvo_moe.core.engine import devices
from lingvo_moe.core.job import ending, watcher
from lingvo_moe.core.runs.run_lock import RunLock

place, number, error, waits, *flags = sys.argv[1:]
ending._PATIENCE = 5.0

def at(here):
    if here == place and devices.process_index() == int(number):
        raise getattr(__builtins__, error)("it broke")

def run(args):
    devices.request_cpu_devices(1)
    devices.initialize_distributed(args.coordinator_address, args.num_processes, args.process_id)
    with contextlib.ExitStack() as stack:
        stack.enter_context(watcher.watching(0))
        lock = stack.enter_context(RunLock(args.logdir))
        trainer.share_run(lock, lambda: at("begin"), lambda: at("follow"))
        ending.together(lambda: at("weights"))
        if waits == "cleanup":
            stack.callback(time.sleep, 300)
        stack.enter_context(ending.announcing())
        at("training")
        if waits == "busy":
            time.sleep(300)
        multihost_utils.sync_global_devices("step")
    return 0

trainer.described_by, trainer.train = lambda args: args, run
print("leaves with", trainer.main(flags))
"""


def _run_job(logdir, *what):
    """Returns status and standard error of both processes, and the seconds until the later one ended."""
    flags = [
        "--model=mt.M4Tiny",
        f"--logdir={logdir}",
        "--num_processes=2",
        f"--coordinator_address={free_address()}",
    ]
    command = ["-c", _TRAINER, *what, *flags]
    with contextlib.ExitStack() as stack:
        job = []
        for i in range(2):
            process = start_python(*command, f"--process_id={i}", stdout=subprocess.DEVNULL)
            job.append(stack.enter_context(process))
            stack.callback(process.kill)
        start = time.monotonic()
        said = [process.communicate(timeout=90)[1] for process in job]
        return [process.returncode for process in job], said, time.monotonic() - start


@pytest.mark.parametrize("place, number, error, waits, line, status, other_line", [
    ("begin", 0, "RuntimeError", "", "RuntimeError: it broke", 1, "(could not begin|failed)"),
    # The other process is busy with work of its own.
    ("training", 0, "MemoryError", "busy", "MemoryError: it broke", 1, "failed"),
])  # fmt: skip
def test_one_fails_and_both_end(tmp_path, place, number, error, waits, line, status, other_line):
    statuses, said, seconds = _run_job(tmp_path / "run", place, str(number), error, waits)
    assert line in said[number], said
    assert re.search(
        rf"^error: process {number} of the job {other_line}; its error says why$",
        said[1 - number],
        re.M,
    ), said
    assert (statuses[number], statuses[1 - number]) == (status, 2), said
    assert seconds < 60


def test_cleaning_up_does_not_wait_for_ever(tmp_path):
    statuses, said, seconds = _run_job(tmp_path / "run", "training", "1", "OSError", "cleanup")
    assert "error: process 1 of the job failed" in said[0]
    assert 0 not in statuses
    assert seconds < 60


_KILLED = """
import os, sys
from lingvo_moe import trainer
from lingvo_moe.core.job.meeting import meet

def killed(engine):
    args = trainer.parse_flags(sys.argv[1:])
    meet(args.coordinator_address, 3, 1)._thread.join()
    os.kill(os.getpid(), 9)

if "--process_id=1" in sys.argv:
    trainer.load_tensorflow = killed
sys.exit(trainer.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_one_that_is_killed_before_it_joins_is_not_waited_for(tmp_path):
    flags = ["--model=toy_task.Line", f"--logdir={tmp_path}/run", "--num_processes=3"]
    flags += [f"--coordinator_address={free_address()}", "--max_steps=1", "--num_devices=1"]
    with contextlib.ExitStack() as stack:
        processes = []
        for i in range(3):
            command = ("-c", _KILLED, *flags, f"--process_id={i}")
            process = stack.enter_context(start_python(*command, stdout=subprocess.DEVNULL))
            stack.callback(process.kill)
            processes.append(process)
        said = [process.communicate(timeout=150)[1] for process in processes]
        assert [process.returncode for process in processes] == [2, -9, 2], said
    for number in (0, 2):
        assert "error: process 1 has ended before it joined the job" in said[number]
