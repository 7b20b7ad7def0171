"""Watches the processes of a job: one that fails, dies or stalls ends all of them; one that is to stop stops all.

Twice a second each process reports how far it is to JAX's coordination service, which process 0 hosts. Process 0 reads
all reports. It names a process that reports nothing any more, as after SIGSTOP, and one that is behind the others for
long, as when a read never returns; every process then ends. If one wants to stop, no process begins a further step
until process 0 has found the furthest step that any has begun, which all of them do before they stop. In an elastic job
all learn which processes are gone (lost.py), and the others have a minute to give up what they did with them.
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
from lingvo_moe.core.job import ending
from lingvo_moe.core.job.lost import LOST
from lingvo_moe.core.job.pace import PACE
from lingvo_moe.core.private.jax import job_state

SILENCE = 10.0  # seconds; less than JAX's heartbeats take, which name neither machine nor step
_INTERVAL = 0.5  # seconds between two looks
_AT = "lingvo_moe/at/"  # the report of each process, by its number
_ORDER = f"{ending.TO_ALL}order"  # of process 0: _HOLD, then the last step
_HOLD = "hold"
_LOST = f"{ending.TO_ALL}lost"  # of process 0: numbers of processes, and a line
# Seconds without a report after which a process is gone, where a collective has failed already; and those that another
# has to give up what it did with lost ones.
_SUSPECT, _LEAVING = 5.0, 60.0
LOSS_SECONDS = SILENCE + 10.0  # after which a loss is known, if there was one


@dataclass(frozen=True)
class Report:
    """The state of a process: how often it has reported, its steps (see Pace), its machine, and what LOST has of it."""

    beats: int
    begun: int
    asks: bool
    paused: bool
    host: str
    suspects: bool = False


class Progress:
    """The times at which each process last reported, and last began a step or was level with the others.

    The clock is the reader's.

    Args:
        stall_seconds: how long a process may be behind another one; 0: for ever.

    Attributes:
        silent: the numbers of the processes that had not reported for long when Why was called last.
    """

    def __init__(self, stall_seconds: float):
        self._stall, self.silent = stall_seconds, list[int]()
        self._heard: dict[int, tuple[int, float]] = {}
        self._moved: dict[int, tuple[int, float]] = {}

    def Why(self, reports: Mapping[int, Report], at: float, silence: float | None = None) -> str:
        """Returns a line about the processes that hold up the job; '' if there are none.

        A process counts once it has begun a step: what comes before may take long on one alone, as compiling does.

        `silence`: seconds without a report that are long; by default SILENCE.
        """
        silence = SILENCE if silence is None else silence
        most = max((report.begun for report in reports.values()), default=0)
        self.silent, silent, behind = [], [], []
        for number, report in sorted(reports.items()):
            if self._heard.get(number, (0, 0.0))[0] != report.beats:
                self._heard[number] = report.beats, at
            if self._moved.get(number, (0, 0.0))[0] != report.begun or report.begun == most:
                self._moved[number] = report.begun, at
            if not report.begun:
                continue
            who = f"process {number} on {report.host}, at step {report.begun}"
            if at - self._heard[number][1] > silence:
                silent.append(who)
                self.silent.append(number)
            elif report.begun < most and 0 < self._stall < at - self._moved[number][1]:
                behind.append(who)
        if silent:
            return f"{'; '.join(silent)}: has not answered for {silence:.0f} s; it was killed, stopped or cut off"
        if behind:
            return f"{'; '.join(behind)}: is behind the others for {self._stall:g} s (train.stall_seconds)"
        return ""


@contextlib.contextmanager
def watching(stall_seconds: float, elastic: bool = False) -> Iterator[None]:
    """Inside the block, this process ends soon after another process of its job fails, dies or stalls.

    Args:
        stall_seconds: how long a process may be behind another one; 0: for ever.
        elastic: whether LOST learns of a process that dies, instead; but not of process 0.
    """
    LOST.Begin(elastic)
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
    PACE.Reset(several=True, tell=watcher.Tell)
    try:
        yield
    finally:
        PACE.Reset(several=False)
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
        self._reporting = threading.Lock()
        # Seconds in which this process was at work itself: the others are not silent while it is stopped.
        self._clock, self._looked = 0.0, time.monotonic()
        self._over = threading.Event()
        self._lost = 0.0  # when processes were lost, by the clock

    def Stop(self) -> None:
        """Ends both threads soon."""
        self._over.set()

    def Exchange(self) -> None:
        """Reports and reads until Stop is called."""
        while not self._over.wait(0.1 if PACE.paused and self._order == _HOLD else _INTERVAL):
            try:
                to_all = dict(self._client.key_value_dir_get(ending.TO_ALL))
                failure = ending.failure(to_all)
                if failure and failure.by != self._number:
                    self.Stop()  # whoever waits for the others answers nobody
                    say(f"error: {failure.line}")
                    ending.leave(ending.STATUS, wait=failure.waits)
                self._obey(to_all.get(_ORDER, ""))
                self._report()
                if lost := to_all.get(_LOST, ""):
                    self._leave_lost(*json.loads(lost))
                elif self._number == 0 and not failure:
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
                ending.end(ending.STATUS)

    def _obey(self, order: str) -> None:
        self._order = order
        if self._order == _HOLD:
            PACE.Hold()
        elif self._order:
            PACE.StopAfter(int(self._order))

    def Tell(self) -> None:
        """Reports at once, if process 0 is there. One that dies after its last report, before a step, is not missed."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._report()

    def _report(self) -> None:
        with self._reporting:
            self._beats += 1
            at = Report(self._beats, PACE.begun, PACE.asks, PACE.paused, self._host, LOST.suspected)
            self._client.key_value_set(
                f"{_AT}{self._number}", json.dumps(asdict(at)), allow_overwrite=True
            )

    def _leave_lost(self, numbers: list[int], line: str) -> None:
        """Tells this process of those that are gone, and ends it where it still waits for them after a while."""
        at = time.monotonic()
        if self._number in numbers:
            say(f"error: this process was taken for lost: {line}")
            ending.end(ending.STATUS)
        if not self._lost:
            self._lost = at
            say(line)
            LOST.Tell(numbers)
        elif at - self._lost > _LEAVING and not LOST.left:
            say(f"error: what was begun with the others could not be given up in {_LEAVING:.0f} s")
            ending.leave(ending.STATUS, line=line, wait=False)

    def _judge(self) -> None:
        entries = self._client.key_value_dir_get(_AT)
        reports = {int(key.rpartition("/")[2]): Report(**json.loads(text)) for key, text in entries}
        at = time.monotonic()
        self._clock, self._looked = self._clock + min(at - self._looked, 2 * _INTERVAL), at
        suspected = any(report.suspects for report in reports.values())
        if why := self._progress.Why(reports, self._clock, _SUSPECT if suspected else SILENCE):
            if (gone := self._progress.silent) and LOST.elastic:
                self._client.key_value_set(_LOST, json.dumps([gone, why]))
                return
            say(f"error: {why}")
            ending.leave(ending.STATUS, line=why, wait=False)
        if not self._order and any(report.asks for report in reports.values()):
            self._client.key_value_set(_ORDER, _HOLD)
        elif self._order == _HOLD and sum(r.paused for r in reports.values()) == self._count:
            last = max(report.begun for report in reports.values())
            self._client.key_value_set(_ORDER, str(last), allow_overwrite=True)
