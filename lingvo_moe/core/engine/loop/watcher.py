"""Watches the processes of a job: one that fails, dies or stalls ends all of them; one that is to stop stops all.

Twice a second each process reports how far it is to JAX's coordination service, which process 0 hosts. Process 0 reads
all reports. It names a process that reports nothing any more, as after SIGSTOP, and one that is behind the others for
long, as when a read never returns; every process then ends. If one wants to stop, no process begins a further step
until process 0 has found the furthest step that any has begun, which all of them do before they stop.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import jax

from lingvo_moe.core.console.command import say
from lingvo_moe.core.engine.loop import job
from lingvo_moe.core.engine.loop.pace import PACE
from lingvo_moe.core.private.jax import job_state

SILENCE = 10.0  # seconds; less than JAX's heartbeats take, which name neither machine nor step
_INTERVAL = 0.5  # seconds between two looks
_AT = "lingvo_moe/at/"  # the report of each process, by its number
_ORDER = f"{job.TO_ALL}order"  # of process 0: _HOLD, then the last step
_HOLD = "hold"


@dataclass(frozen=True)
class Report:
    """The state of a process: how often it has reported, its steps (see Pace), and its machine."""

    beats: int
    begun: int
    asks: bool
    held: bool
    host: str


class Progress:
    """The times at which each process last reported, and last began a step or was level with the others.

    The clock is the reader's.

    `stall_seconds`: how long a process may be behind another one; 0: for ever.
    """

    def __init__(self, stall_seconds: float):
        self._stall = stall_seconds
        self._heard: dict[int, tuple[int, float]] = {}
        self._moved: dict[int, tuple[int, float]] = {}

    def Why(self, reports: Mapping[int, Report], now: float) -> str:
        """Returns a line about the processes that hold up the job; '' if there are none.

        A process counts once it has begun a step: what comes before may take long on one alone, as compiling does.
        """
        most = max((report.begun for report in reports.values()), default=0)
        silent, behind = [], []
        for number, report in sorted(reports.items()):
            if self._heard.get(number, (0, 0.0))[0] != report.beats:
                self._heard[number] = report.beats, now
            if self._moved.get(number, (0, 0.0))[0] != report.begun or report.begun == most:
                self._moved[number] = report.begun, now
            if not report.begun:
                continue
            who = f"process {number} on {report.host}, at step {report.begun}"
            if now - self._heard[number][1] > SILENCE:
                silent.append(who)
            elif report.begun < most and 0 < self._stall < now - self._moved[number][1]:
                behind.append(who)
        if silent:
            return f"{'; '.join(silent)}: has not answered for {SILENCE:.0f} s; it was killed, stopped or cut off"
        if behind:
            return f"{'; '.join(behind)}: is behind the others for {self._stall:g} s (train.stall_seconds)"
        return ""


@contextlib.contextmanager
def watching(stall_seconds: float) -> Iterator[None]:
    """Inside the block, this process ends soon after another process of its job fails, dies or stalls.

    `stall_seconds`: how long a process may be behind another one; 0: for ever.
    """
    if job_state().client is None:
        yield
        return
    watcher = _Watcher(stall_seconds)
    threads = [
        threading.Thread(target=target, name="job", daemon=True)
        for target in (watcher.Exchange, watcher.AwaitAnswers)
    ]
    for thread in threads:
        thread.start()
    PACE.several = True
    try:
        yield
    finally:
        PACE.several = False
        watcher.Stop()
        for thread in threads:
            thread.join()


class _Watcher:
    def __init__(self, stall_seconds: float):
        state = job_state()
        self._client, self._address = state.client, state.coordinator_address
        self._number, self._count = state.process_id, state.num_processes
        self._progress = Progress(stall_seconds)
        self._host = socket.gethostname()
        self._beats, self._order = 0, ""
        # Seconds in which this process was at work itself: the others are not silent while it is stopped.
        self._clock, self._looked = 0.0, time.monotonic()
        self._over = threading.Event()

    def Stop(self) -> None:
        """Ends both threads soon."""
        self._over.set()

    def Exchange(self) -> None:
        """Reports and reads until Stop is called."""
        while not self._over.wait(0.1 if PACE.held and self._order == _HOLD else _INTERVAL):
            try:
                to_all = dict(self._client.key_value_dir_get(job.TO_ALL))
                failure = job.failure(to_all)
                if failure and failure.by != self._number:
                    self.Stop()  # whoever waits for the others answers nobody
                    say(f"error: {failure.line}")
                    job.leave(job.STATUS, wait=failure.waits)
                self._obey(to_all.get(_ORDER, ""))
                self._report()
                if self._number == 0 and not failure:
                    self._judge()
            except jax.errors.JaxRuntimeError:  # process 0 is gone, or does not answer
                continue
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(f"{_AT}{self._number}")

    def AwaitAnswers(self) -> None:
        """Ends this process if process 0 does not answer, whose service then keeps the other thread waiting."""
        beats, silent = 0, 0.0
        while self._number and not self._over.wait(_INTERVAL):
            silent = silent + _INTERVAL if self._beats == beats else 0.0
            beats = self._beats
            if PACE.begun and silent > SILENCE:
                say(
                    f"error: process 0 of the job, at {self._address}, has not answered for {SILENCE:.0f} s; it was "
                    f"stopped or cut off (this is process {self._number}, at step {PACE.begun})"
                )
                job.end(job.STATUS)

    def _obey(self, order: str) -> None:
        self._order = order
        if self._order == _HOLD:
            PACE.Hold()
        elif self._order:
            PACE.StopAfter(int(self._order))

    def _report(self) -> None:
        self._beats += 1
        report = Report(self._beats, PACE.begun, PACE.asks, PACE.held, self._host)
        self._client.key_value_set(
            f"{_AT}{self._number}", json.dumps(asdict(report)), allow_overwrite=True
        )

    def _judge(self) -> None:
        found = self._client.key_value_dir_get(_AT)
        reports = {int(key.rpartition("/")[2]): Report(**json.loads(text)) for key, text in found}
        now = time.monotonic()
        self._clock, self._looked = self._clock + min(now - self._looked, 2 * _INTERVAL), now
        if why := self._progress.Why(reports, self._clock):
            say(f"error: {why}")
            job.leave(job.STATUS, line=why, wait=False)
        if not self._order and any(report.asks for report in reports.values()):
            self._client.key_value_set(_ORDER, _HOLD)
        elif self._order == _HOLD and sum(r.held for r in reports.values()) == self._count:
            last = max(report.begun for report in reports.values())
            self._client.key_value_set(_ORDER, str(last), allow_overwrite=True)
