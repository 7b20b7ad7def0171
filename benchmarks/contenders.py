"""Processes that take steps when asked: what benchmarks compare, side by side in one run.

A contender prints `ready {...}` once it has warmed up; each line on its standard input then asks for one
step, which it answers by a line of JSON.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from tools import _cli

ROOT = Path(__file__).resolve().parent.parent
_MACHINE = "Measured on "
_MOST_TO_SAVE = 60.0  # seconds


def define_contender_flags(flags: Flags, ours: Collection[str], peers: Collection[str]) -> None:
    """Defines --peers, and --only, which chooses among contenders of these names; kinds_of reads both."""
    names = [*ours, *peers]
    flags.DEFINE_string("peers", "", "the Python of the peers' environment")
    flags.DEFINE_list("only", (), f"contenders: some of {', '.join(names)}", names)

    def why(values: Mapping[str, Any]) -> str:
        chosen = [name for name in values["only"] if name in peers]
        if values["peers"] or not chosen:
            return ""
        return f"--only={','.join(chosen)} needs --peers, the Python of what install_peers.sh makes"

    flags.Refuse(["only", "peers"], why)


def kinds_of(args: Flags, ours: Collection[str], peers: Collection[str]) -> tuple[str, ...]:
    """The contenders that the flags choose: without --only all, but peers with --peers alone."""
    return tuple(args.only or (*ours, *(peers if args.peers else ())))


class Process:
    """A process that is measured, on `threads` cores.

    Usage:
        with Process("peer", command, threads=1) as process:  # killed at the end of the block
            line = process.Line("ready ")

    Args:
        name: for errors.
        command: the program and its arguments.
        threads: how many cores.
        log: the file for its standard error; None for a temporary one.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int, log: Path | None = None):
        environment = {
            **os.environ,
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # read when a process starts, never later
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": "1",  # as our commands have it
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false" if threads == 1 else "",
        }
        self.name = name
        # A pipe that nobody reads would stop a process that complains much.
        self._errors = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        # One thread is one core: what a runtime does in helper threads counts too.
        os.sched_setaffinity(self._process.pid, sorted(os.sched_getaffinity(0))[-threads:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.Stop()

    def Send(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def Line(self, start: str) -> str:
        """The next line that begins with `start`. Raises ChildProcessError, with what it complained of, if it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        raise ChildProcessError(f"{self.name} ended: {errors.strip()[-2000:]}")

    def Stop(self) -> None:
        """Ends the process, which may first save its work."""
        self._process.terminate()
        try:
            self._process.communicate(timeout=_MOST_TO_SAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()


class Contender(Process):
    """A process that takes steps, alone on `threads` cores during its turn.

    Attributes:
        name: its name.
        answers: its answers, one for each step.
        about: its description, printed when it was ready.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int):
        super().__init__(name, command, threads)
        self.answers, self.about = list[dict[str, Any]](), dict[str, Any]()

    def WaitUntilReady(self) -> None:
        """Raises ChildProcessError, with what it complained of, where it ends instead."""
        self.about = json.loads(self.Line("ready ").removeprefix("ready "))

    def Step(self) -> None:
        """One step, whose answer is kept."""
        self.Send("")
        self.answers.append(json.loads(self.Line("{")))

    def Median(self, key: str) -> float:
        """The median over all steps."""
        return statistics.median(answer[key] for answer in self.answers)


def take_turns(
    commands: Mapping[str, Sequence[str]], threads: int, rounds: int, leave_out: bool = False
) -> list[Contender]:
    """Starts all, two at a time, and has each take its steps in turn; every other round from the last to the first.

    Args:
        commands: of each contender, by name.
        threads: of each.
        rounds: steps of each.
        leave_out: whether to report and leave out those that end before they are ready.

    Raises:
        ChildProcessError: one ended.
    """
    contenders: list[Contender] = []

    def start(name: str) -> Contender | None:
        contender = Contender(name, commands[name], threads)
        contenders.append(contender)
        try:
            contender.WaitUntilReady()
        except ChildProcessError as e:
            if not leave_out:
                raise
            print(f"left out: {e}", file=sys.stderr, flush=True)
            return None
        print(f"{name} is ready", file=sys.stderr, flush=True)
        return contender

    try:
        with ThreadPoolExecutor(max_workers=2) as pool:
            ready = [c for c in pool.map(start, commands) if c]
        for number in range(rounds):
            for contender in ready if number % 2 == 0 else ready[::-1]:
                contender.Step()
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        return ready
    finally:
        for contender in contenders:
            contender.Stop()


def import_published(model: str | Path, run: Path) -> None:
    """Imports a published checkpoint into a run. Raises as import_checkpoint."""
    _cli.load_tensorflow()
    from lingvo_moe.tasks.families.importing import import_checkpoint, open_published

    import_checkpoint(open_published(model), run, lambda *_: None)


def update_page(page: Path, name: str, text: str) -> None:
    """Puts `text` between the page's two marker lines of that name.

    Where its last line says "Measured on" a machine, tables of other machines stay before it.

    Raises:
        ValueError: the page lacks them.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    block, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} lacks the lines {begin} and {end}")
    last_line = text.splitlines()[-1]
    if last_line.startswith(_MACHINE):
        tables = re.findall(
            rf"(.*?^{_MACHINE}[^\n]*)\n+", block.lstrip("\n"), re.DOTALL | re.MULTILINE
        )
        text = "\n\n".join([old for old in tables if not old.endswith(f"\n{last_line}")] + [text])
    files.write_atomic(str(page), f"{head}{begin}\n{text}\n{end}{tail}".encode())
