"""Processes step together: one that is stopped, killed or stalls is named, and a wish to stop stops all at a step."""

import re
import signal
import time

import pytest
from processes import free_address, start_python

from lingvo_moe.core.engine.devices import HEARTBEAT_SECONDS
from lingvo_moe.core.job.pace import ProcessSteps
from lingvo_moe.core.job.watcher import SILENCE, Progress, Report

# Steps without a model. The barrier in place of a collective keeps the processes together.
_WORKER = """
import signal, sys, time
from lingvo_moe.core.engine.devices import initialize_distributed, request_cpu_devices
from lingvo_moe.core.job import watcher
from lingvo_moe.core.job.pace import PACE
from lingvo_moe.core.private.jax import job_state

address, count, number, stalls = sys.argv[1], *map(int, sys.argv[2:])
asked, watcher.SILENCE = [], 4.0
request_cpu_devices(1)
initialize_distributed(address, count, number)
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with watcher.watching(stall_seconds=2 if stalls >= 0 else 50):
    step = 0
    while True:
        if stalls == number and step == 60:
            time.sleep(1000)
        if not PACE.Begin(step, bool(asked)):
            break
        job_state().client.wait_at_barrier(f"step {step}", 1000_000)
        step += 1
        time.sleep(0.01 * (number + 1))
        if step == 60:
            print("at work", flush=True)
print("stopped at", step, flush=True)
"""


class _Job:
    def __init__(self, count: int, stalls: int = -1):
        address = free_address()
        self.processes = [
            start_python("-c", _WORKER, address, *map(str, (count, i, stalls)))
            for i in range(count)
        ]
        for process in self.processes:
            assert process.stdout and process.stdout.readline() == "at work\n"
        self.start = time.monotonic()

    def Ends(self, but: int = -1) -> list[tuple[int, str]]:
        """The status of the processes, but for one, and what they said."""
        found = []
        for number in {*range(len(self.processes))} - {but}:
            out, err = self.processes[number].communicate(timeout=60)
            found.append((self.processes[number].returncode, out + err))
        return found


@pytest.fixture
def make_job():
    jobs = []
    yield lambda *args: jobs.append(_Job(*args)) or jobs[-1]
    for process in jobs[-1].processes:
        process.kill()
        process.communicate()


def test_a_process_tells_of_its_first_step_when_it_begins():
    """A process that did not, and is killed soon after, would count as not begun, and nobody would wait for it."""
    pace, told = ProcessSteps(), []
    pace.Reset(several=True, tell=lambda: told.append(pace.begun))
    assert pace.Begin(7, False) and pace.Begin(8, False)
    pace.End()
    assert pace.Begin(3, False) and told == [8, 4]


@pytest.mark.slow
@pytest.mark.parametrize("count, number, by, who", [
    (2, 0, signal.SIGSTOP, "of the job, at 127.0.0.1:"),
    (3, 2, signal.SIGSTOP, "on .*, at step [0-9]+: has not answered"),
    (2, 1, signal.SIGKILL, "on .*, at step [0-9]+: has not answered"),
])  # fmt: skip
def test_a_process_that_is_gone_is_named_by_the_others(make_job, count, number, by, who):
    job = make_job(count)
    job.processes[number].send_signal(by)
    for status, said in job.Ends(but=number):
        assert status == 2 and re.search(f"^error: process {number} {who}", said, re.M), said
    assert time.monotonic() - job.start < 30


@pytest.mark.slow
def test_a_process_that_stalls_is_named_by_all(make_job):
    job = make_job(2, 1)
    for status, said in job.Ends():
        assert status == 2, said
        assert re.search(
            r"^error: process 1 on .*, at step 60: is behind the others", said, re.M
        ), said
    assert time.monotonic() - job.start < 30


@pytest.mark.slow
def test_a_signal_to_one_stops_all_after_the_same_step(make_job):
    job = make_job(3)
    job.processes[1].terminate()
    steps = {re.search(r"stopped at (\d+)", said)[1] for _, said in job.Ends()}
    assert len(steps) == 1
    assert time.monotonic() - job.start < 30


def test_who_holds_up_a_job():
    assert SILENCE + 3 < HEARTBEAT_SECONDS / 2  # else JAX, which names nobody, may be first
    progress = Progress(stall_seconds=30)

    def why(now, *begun, beats=None):
        beats = beats or [now] * len(begun)
        reports = enumerate(zip(beats, begun))
        return progress.Why({i: Report(b, n, False, False, f"h{i}") for i, (b, n) in reports}, now)

    assert not why(0, 0, 0, 0)
    assert not why(1000, 5, 0, 5)  # process 1 compiles still
    assert not why(1001, 6, 6, 6)
    assert not why(1300, 6, 6, 6)  # an evaluation, of all
    assert not why(1301, 7, 6, 7)
    assert not why(1302, 8, 7, 8)
    assert not why(1332, 8, 7, 8)
    assert why(1333, 8, 7, 8) == (
        "process 1 on h1, at step 7: is behind the others for 30 s (train.stall_seconds)"
    )
    assert not why(1340, 9, 8, 9, beats=[9, 9, 9])
    assert not why(1350, 9, 9, 9, beats=[10, 9, 9])
    assert why(1351, 9, 9, 9, beats=[11, 9, 9]) == (
        "process 1 on h1, at step 9; process 2 on h2, at step 9: has not answered for 10 s; it was killed, stopped or "
        "cut off"
    )


def test_alone_a_run_stops_at_once():
    pace = ProcessSteps()
    assert pace.Begin(3, asks=False) and not pace.Begin(4, asks=True)


def test_held_steps_go_on_to_the_last_one():
    pace = ProcessSteps()
    pace.several = True
    assert pace.Begin(0, asks=False) and pace.Begin(1, asks=True)
    assert (pace.begun, pace.asks) == (2, True)
    pace.Hold()
    assert pace.paused
    pace.StopAfter(4)
    assert [pace.Begin(step, asks=False) for step in (2, 3, 4)] == [True, True, False]
