"""Kills, stops and restarts a training run at random, and compares its losses with those of an undisturbed run.

    python -m tools.soak --data_dir=CORPUS --output=SOAK --rounds=30 --mtbf=40s --max_processes=2

Each round starts the trainer and disrupts it after a random time: by SIGKILL, or by SIGTERM, with which preemptions are
announced. In the last third of the rounds it also restarts on other numbers of devices and processes; all are virtual
devices of this machine. At the end two runs are in SOAK: `disturbed`, and `undisturbed`, which changes its layout at
the same steps, but is never killed. Their losses in the first two thirds must be equal bit for bit, and all later ones
within --tolerance; and so must be those of the first steps that a restart did again, on whatever layout, and the ones
from before it. The goodput that was measured is printed beside the predicted one. Rounds follow from --seed. After
Ctrl-C the same command goes on. The exit status is 0, 1 where losses differ or the trainer does not recover, 2 for a
mistake in flags, 130 after Ctrl-C.
"""

import contextlib
import math
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingvo_moe.core.config import checks
from lingvo_moe.core.console import units
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags, join_overrides
from lingvo_moe.core.files.checked_lines import append_row, end_last_line, parse
from lingvo_moe.core.pages import tables
from lingvo_moe.core.runs.goodput import Segment, account, read_segments
from lingvo_moe.core.runs.goodput_prediction import FailingMachine
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.runs.time_record import STEP

from . import _cli
from .goodput import parts_table, print_table, read_time, summary

_JOURNAL = "rounds.jsonl"
_MTBF = 30.0
_MANY = 10**9  # steps: more than any round does
_MORE_STEPS = 5  # that both runs go on after the last disruption
_KILL_SECONDS = 10.0  # that other processes of a job have to end after one was killed; then they are killed, too
_STOP_SECONDS = 120.0  # and after SIGTERM
_JUDGED = 20  # steps after a restart whose losses must be those from before it
_LOOK = 0.05  # seconds between two looks at the processes

# What became of a round.
KILLED = "killed"
STOPPED = "stopped: saved at the same step by all processes"
EARLY = "stopped before it had begun to train"
IGNORED = f"did not stop within {_STOP_SECONDS:.0f} s of SIGTERM, and was killed"


class SoakError(ValueError):
    """The trainer did not go on after a disruption, or its losses differ from those of the run without."""


@dataclass(frozen=True)
class Layout:
    """The processes of a job on this machine, and the virtual devices of each."""

    processes: int
    devices: int

    def __str__(self) -> str:
        """The layout in a line of progress."""
        return f"{self.processes} x {self.devices} devices"


@dataclass(frozen=True)
class Round:
    """A start of the trainer and its disruption."""

    layout: Layout
    after: float  # seconds from the start to the signal
    number: signal.Signals  # which signal
    victim: int  # the process that gets it


def plan_round(number: int, args: Flags) -> Round:
    """The round of a number, from 0; the same for the same flags."""
    rng = random.Random(f"{args.seed} {number}")
    layout = Layout(1, args.num_devices)
    if number >= args.rounds - args.rounds // 3:
        layout = rng.choice(layouts(args.num_devices, args.max_processes))
    after = rng.expovariate(1 / (args.mtbf or _MTBF))
    stops = rng.random() < args.announced
    victim = rng.randrange(layout.processes)
    return Round(layout, after, signal.SIGTERM if stops else signal.SIGKILL, victim)


def layouts(devices: int, processes: int) -> list[Layout]:
    """Layouts of at most so many devices and processes; powers of two, which divide what is sharded."""
    powers = [1 << i for i in range(devices.bit_length()) if 1 << i <= devices]
    found = [Layout(p, d) for p in range(1, processes + 1) for d in powers if p * d in powers]
    return [x for x in found if x != Layout(1, devices)] or [Layout(1, devices)]


def define_flags() -> Flags:
    flags = Flags("python -m tools.soak", __doc__)
    flags.DEFINE_string("model", "mt.M4Tiny", "a small experiment")
    flags.DEFINE_path("data_dir", "", "its data, as for the trainer")
    flags.DEFINE_override()
    flags.DEFINE_path(
        "output",
        None,
        "directory of the soak, new or of the same one",
        required=True,
        portable=True,
    )
    flags.DEFINE_integer("rounds", 30, "disruptions", checks.SIZE)
    flags.DEFINE_parsed(
        "mtbf", None, "mean time from a start to its disruption (default: 30s)", read_time
    )
    flags.DEFINE_float(
        "announced", 0.5, "share of disruptions that are SIGTERM", checks.Number(0, 1)
    )
    flags.DEFINE_integer("num_devices", 4, "virtual devices; a power of two", checks.Integer(1, 64))
    flags.DEFINE_integer("max_processes", 1, "processes of a job at most", checks.Integer(1, 4))
    flags.DEFINE_float(
        "tolerance", 1e-5, "difference of losses; relative, above 1", checks.POSITIVE
    )
    flags.DEFINE_integer("seed", 0, "chooses times, signals and layouts", checks.COUNT)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if args.num_devices & (args.num_devices - 1):
        args.Fail(f"--num_devices={args.num_devices}: must be a power of two")
    # Ends the trainers, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return _cli.attempt("soak", lambda: run(args), "interrupted; the same command goes on")


def run(args: Flags) -> int:
    """Does all rounds that are not done, trains undisturbed, and compares; returns the exit status."""
    output = Path(args.output)
    _cli.check_output_directory(output)
    names = (name for name in args.Names() if name not in ("output", "tolerance"))
    journal = Journal(output / _JOURNAL, {name: args[name].value for name in names})
    for number in range(len(journal.rounds), args.rounds):
        planned = plan_round(number, args)
        begins, began = max(RunDir(output / "disturbed").steps, default=0), time.time()
        say(f"round {number + 1} of {args.rounds}: {planned.layout} from step {begins}")
        with started(args, planned.layout, output / "disturbed", _MANY) as job:
            how = disrupt(job, planned)
        journal.Add({"begins": begins, "began": began, "how": how})
        say(f"round {number + 1} of {args.rounds}: {how} after {planned.after:.1f} s")
    if not journal.end:
        last = max((step for step, _ in losses(output / "disturbed")), default=0)
        journal.Add({"end": last + _MORE_STEPS})
    parts = layouts_by_step(args, journal)
    for name, (layout, end) in [
        ("disturbed", parts[-1]),
        *(("undisturbed", part) for part in parts),
    ]:
        if max(RunDir(output / name).steps, default=0) >= end:
            continue
        say(f"{name}: {layout} up to step {end}")
        with started(args, layout, output / name, end) as job:
            if job.HasEnded() and any(process.poll() for process in job.processes):
                raise job.Failed("did not end well")
    return report(args, journal, output)


def layouts_by_step(args: Flags, journal: "Journal") -> list[tuple[Layout, int]]:
    """The layouts of the steps that lasted, each with the last step done on it, ascending."""
    found = list[tuple[Layout, int]]()
    ends = [*(row["begins"] for row in journal.rounds[1:]), journal.end]
    for number, end in enumerate(ends):
        layout = plan_round(number, args).layout
        if found and found[-1][0] == layout:
            found.pop()
        if not found or end > found[-1][1]:
            found.append((layout, end))
    return found


class Journal:
    """The rounds that are done, in a file, so that the same command goes on.

    Attributes:
        rounds: a row for each.
        end: the step at which both runs end; 0 while that is not known.
    """

    def __init__(self, file: Path, settings: dict[str, Any]):
        """Reads the file, or begins it. Raises SoakError: it is that of another soak."""
        file.parent.mkdir(parents=True, exist_ok=True)
        end_last_line(file)
        lines = file.read_bytes().splitlines() if file.exists() else []
        self._file, rows = file, [row for line in lines if (row := parse(line))]
        self.rounds = [row for row in rows if "how" in row]
        self.end = max((row["end"] for row in rows if "end" in row), default=0)
        if not rows:
            append_row(file, settings)
        for name, value in settings.items():
            if rows and rows[0].get(name) != value:
                raise SoakError(
                    f"{file.parent} holds a soak with --{name}={rows[0].get(name)}; give another --output"
                )

    def Add(self, row: dict[str, Any]) -> None:
        """Adds a row for a round, or for the end."""
        append_row(self._file, row)
        self.rounds += [row] if "how" in row else []
        self.end = row.get("end", self.end)


class TrainerJob:
    """The processes of a trainer; their output is in `log`."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], log: Path):
        self.processes, self._log = processes, log

    def HasEnded(self, within: float = math.inf) -> bool:
        """Waits until all processes have ended, at most so many seconds; returns whether they have."""
        until = time.monotonic() + within
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK)
        return True

    def Failed(self, how: str) -> SoakError:
        """The error for a trainer that did not do what it should."""
        lines = self._log.read_text("utf-8", "replace").splitlines()
        statuses = [process.poll() for process in self.processes]
        return SoakError(f"the trainer {how}, status {statuses}: {lines[-1:]}; see {self._log}")


@contextlib.contextmanager
def started(args: Flags, layout: Layout, logdir: Path, max_steps: int) -> Iterator[TrainerJob]:
    """The trainer, in processes of its own, which have ended after the block."""
    override = join_overrides("train.summary_interval_steps=1", args.model_params_override)
    flags = {
        "model": args.model,
        "logdir": logdir,
        "max_steps": max_steps,
        "engine": "pjrt",
        "num_devices": layout.devices,
        "model_params_override": override,
    }
    flags |= {"data_dir": args.data_dir} if args.data_dir else {}
    if layout.processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        flags |= {"coordinator_address": address, "num_processes": layout.processes}
    command = [sys.executable, "-m", "lingvo_moe.trainer"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    log = logdir.with_suffix(".log")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with open(log, "ab") as out:
            for i in range(layout.processes):
                one = [*command, f"--process_id={i}"] if layout.processes > 1 else command
                # A session of its own: Ctrl-C is for this command, which then ends the trainer.
                process = subprocess.Popen(one, stdout=out, stderr=out, start_new_session=True)
                processes.append(process)
        yield TrainerJob(processes, log)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def disrupt(job: TrainerJob, planned: Round) -> str:
    """Waits for the time of a round and sends its signal; returns what became of it.

    Raises SoakError: the trainer ended before, or does not end in good order where it is alone.
    """
    if job.HasEnded(planned.after):
        raise job.Failed("ended by itself")
    job.processes[planned.victim].send_signal(planned.number)
    if planned.number == signal.SIGKILL:
        job.HasEnded(_KILL_SECONDS)
        return KILLED
    if not job.HasEnded(_STOP_SECONDS):
        return IGNORED
    statuses = {process.poll() for process in job.processes}
    if statuses == {128 + signal.SIGTERM}:
        return STOPPED
    if len(job.processes) == 1 and statuses != {-signal.SIGTERM}:
        raise job.Failed("did not stop in good order")
    return EARLY


def losses(run: Path) -> list[tuple[int, float]]:
    """The steps and losses of a run, in the order in which they were done."""
    file = RunDir(run).summaries_dir / "metrics.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    rows = [row for line in lines if (row := parse(line))]
    return [(row["step"], math.nan if row["loss"] is None else row["loss"]) for row in rows]


def done_again(rows: Sequence[tuple[int, float]]) -> list[tuple[int, float, float]]:
    """The first steps that each restart did again: the step, its loss then and the one before."""
    found = list[tuple[int, float, float]]()
    before = dict[int, float]()
    start = last = 0
    for step, loss in rows:
        start = step if step <= last else start
        if step in before and step < start + _JUDGED:
            found.append((step, loss, before[step]))
        before[step], last = loss, step
    return found


def report(args: Flags, journal: Journal, output: Path) -> int:
    """Prints what became of the rounds, the losses and the goodput; returns the exit status."""
    how = Counter(row["how"] for row in journal.rounds)
    changed = args.rounds - args.rounds // 3
    rows = [[what, f"{count:,}"] for what, count in sorted(how.items())]
    print_table(tables.Table([*tables.words("disruption"), *tables.numbers("rounds")], rows))
    exact = journal.rounds[changed]["begins"] if args.rounds // 3 else journal.end
    wrong = compare(output, exact, journal.end, args.tolerance)
    segments = read_segments(RunDir(output / "disturbed").time_file)[0]
    found = account(segments)
    print_table(parts_table(found))
    print(summary(found))
    if args.rounds // 3:
        segments = [s for s in segments if s.began < journal.rounds[changed]["began"]]
    print_prediction(journal.rounds[:changed], segments)
    _cli.made(output / "disturbed", output / "undisturbed")
    return wrong


def print_prediction(rounds: Sequence[dict[str, Any]], segments: Sequence[Segment]) -> None:
    """Prints the goodput of rounds on one layout beside the one predicted from what they took, if that is known."""
    found = account(segments)
    if not (found.save_seconds and found.restart_seconds and found.interval_seconds):
        return
    # The first start, which compiles, is no restart, of which alone the prediction knows.
    first = segments[0].stepped
    total = found.total - (first.elapsed - found.step_seconds if first else 0.0)
    stops = sum(row["how"] == STOPPED for row in rounds)
    machine = FailingMachine(
        *(total / len(rounds), found.save_seconds, found.restart_seconds),
        *(found.interval_seconds, stops / len(rounds), found.share_of_steps),
    )
    predicted, measured = map(units.share, (machine.Goodput(), found.seconds[STEP] / total))
    print(
        f"first layout, without the first start: predicted {predicted}, measured {measured}; seconds: "
        f"{machine.mtbf:.1f} between disruptions, {machine.restart:.1f} a restart, {machine.save:.2f} a save, "
        f"{machine.interval:.1f} between saves"
    )


def compare(output: Path, exact: int, end: int, tolerance: float) -> int:
    """Prints how far losses are apart; 1 where that is too far, or where none is a number.

    They are those of both runs, which are equal up to step `exact`, and those of steps that were done again, from the
    same checkpoint: of these the first ones, since rounding makes layouts drift apart.
    """
    rows = losses(output / "disturbed")
    one, other = dict(rows), dict(losses(output / "undisturbed"))
    steps = range(1, end + 1)
    missing = [step for step in steps if step not in one or step not in other]
    after = [(s, one[s], other[s]) for s in steps[exact:] if s not in missing]
    again = done_again(rows)
    common = [step for step in steps[:exact] if step not in missing]
    differ = [step for step in common if apart(one[step], other[step])]
    far = [step for step, *pair in (*after, *again) if apart(*pair) > tolerance]
    for found, what in (
        (missing, "are missing"),
        (differ, "differ"),
        (far, f"are more than {tolerance:g} apart"),
    ):
        if found:
            say(f"soak: the losses of {len(found)} steps {what}, first that of step {found[0]}")
    most, most_after = (max((apart(*x[1:]) for x in of), default=0.0) for of in (again, after))
    equal = sum(one[step] == other[step] for step in common)
    print(f"losses of {equal} of {exact} steps on the same layout: equal bit for bit")
    if skipped := len(common) - len(differ) - equal:
        print(f"losses of {skipped} steps on the same layout are no numbers in both runs")
    print(f"losses of {len(after)} steps on other layouts: at most {most_after:.1e} apart")
    print(f"losses of {len(again)} steps that were done again: at most {most:.1e} apart")
    return int(bool(missing or differ or far) or all(map(math.isnan, one.values())))


def apart(loss: float, other: float) -> float:
    """The difference of two losses; relative, where they are above 1. 0 where both are no numbers."""
    if math.isnan(loss) and math.isnan(other):
        return 0.0
    difference = abs(loss - other) / max(1.0, abs(other))
    return math.inf if math.isnan(difference) else difference


if __name__ == "__main__":
    _cli.run(main)
