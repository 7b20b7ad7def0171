"""Prints where the time of a run went, and what a machine that fails will deliver.

    python -m tools.goodput --logdir=RUN
    python -m tools.goodput --logdir=RUN --predict --mtbf=3.1h
    python -m tools.goodput --predict --mtbf=3.1h --save_seconds=20 --restart_seconds=600 --interval=10min

Goodput is the share of the time in which steps were done that lasted. The record is RUN/time.jsonl; nothing else is
needed, and the trainer may be at work. The names are those of Google's ml-goodput-measurement. --predict computes the
goodput that is to be expected with an interval of checkpoints, and the best interval. Times have a unit: 90s, 10min,
3.1h, 2d. What no flag gives is taken from the run, where there is one.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from lingvo_moe.core.config import checks
from lingvo_moe.core.console import units
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files.files import write_json
from lingvo_moe.core.pages import tables
from lingvo_moe.core.runs.goodput import PARTS, Goodput, GoodputError, account, read_segments
from lingvo_moe.core.runs.goodput_prediction import FailingMachine
from lingvo_moe.core.runs.run_dir import RunDir

from . import _cli

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_OF_PREDICTION = "mtbf save_seconds restart_seconds interval announced"


def read_time(text: str) -> float:
    """Seconds from a number with a unit, e.g. '3.1h'. Raises ValueError."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(s|min|h|d)", text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not checks.POSITIVE.Allows(seconds):
        raise ValueError("must be a positive number with a unit, e.g. 90s, 10min, 3.1h or 2d")
    return seconds


def define_flags() -> Flags:
    flags = Flags("python -m tools.goodput", __doc__)
    help = "the run, as given to the trainer"
    flags.DEFINE_path("logdir", None, help, portable=True, address=True)
    flags.DEFINE_boolean("predict", False, "also predict goodput and the best interval")
    flags.DEFINE_path("json", "", "write all figures to this file as JSON")
    of_run = "(default: as in the run)"
    with flags.Section("with --predict"):
        flags.DEFINE_parsed(
            "mtbf", None, f"mean time between disruptions of the whole machine {of_run}", read_time
        )
        for name, what in (
            ("save_seconds", "for which training waits at a checkpoint"),
            ("restart_seconds", "from a disruption to the next step"),
        ):
            flags.DEFINE_float(name, None, f"seconds {what} {of_run}", checks.POSITIVE)
        flags.DEFINE_parsed(
            "interval", None, f"time from one save to the next {of_run}, else the best", read_time
        )
        flags.DEFINE_float(
            "announced",
            0.0,
            "share of disruptions that SIGTERM announces in time to save, so that no step is lost",
            checks.Number(0, 1),
        )
    flags.OnlyWith(_OF_PREDICTION, predict=True)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if not args.logdir and not args.predict:
        args.Fail("nothing to do: give --logdir, or --predict")
    return _cli.attempt("goodput", lambda: run(args))


def run(args: Flags) -> int:
    """Prints what the flags ask for; returns the exit status."""
    _cli.check_output_files(args, "json")
    run = measured(args.logdir) if args.logdir else None
    figures = dict[str, Any]()
    if run:
        figures["run"] = {**asdict(run), "total_elapsed_time": run.total, "goodput": run.goodput}
    machine = predicted(args, run) if args.predict else None
    if machine:
        figures["prediction"] = {**asdict(machine), "goodput": machine.Goodput()}
        figures["best"] = {"interval": machine.BestInterval(), "goodput": best(machine).Goodput()}
    if args.json:
        write_json(args.json, figures)
    if run:
        print_table(parts_table(run))
        print(summary(run))
    if machine:
        print_table(prediction_table(machine, run.step_seconds if run else None))
    if args.json:
        _cli.made(args.json)
    return 0


def measured(logdir: str) -> Goodput:
    """Reads where the time of a run went. Raises GoodputError."""
    segments, damaged = read_segments(RunDir(logdir).time_file)
    if damaged:
        say(f"goodput: {damaged} damaged lines of {logdir} were left out; the others hold the rest")
    return account(segments)


def print_table(table: tables.Table) -> None:
    """Prints a table without wrapping its cells, which may be names to look for."""
    print(*tables.lines(table), sep="\n")


def parts_table(run: Goodput) -> tables.Table:
    """A row for each part of a run's time that took half a millisecond or more, and one for their sum."""
    shown = {name: value for name, value in run.seconds.items() if value >= 0.0005}
    rows = [
        [name, units.duration(value), units.share(value / run.total), PARTS[name]]
        for name, value in shown.items()
    ]
    rows.append(["total", units.duration(run.total), units.share(1.0), ""])
    columns = [*tables.words("part"), *tables.numbers("time", "share"), *tables.words("what it is")]
    return tables.Table(columns, rows)


def summary(run: Goodput) -> str:
    """A sentence about a run."""
    text = f"goodput {units.share(run.goodput)}: {run.max_productive_step:,} steps of "
    text += f"{units.duration(run.step_seconds)}; starts: {run.segments}, of which "
    text += f"{run.disruptions} were disrupted"
    for what, value in (
        ("between disruptions", run.mtbf),
        ("a save", run.save_seconds),
        ("a restart", run.restart_seconds),
    ):
        text += f", {units.duration(value)} {what}" if value is not None else ""
    return text


def predicted(args: Flags, run: Goodput | None) -> FailingMachine:
    """The machine that the flags describe, with what they leave out from a run.

    Raises GoodputError: neither has it.
    """
    of_run = {
        "mtbf": run and run.mtbf,
        "save_seconds": run and run.save_seconds,
        "restart_seconds": run and run.restart_seconds,
        "interval": run and run.interval_seconds,
    }
    values = {name: getattr(args, name) or value for name, value in of_run.items()}
    missing = [f"--{name}" for name, value in values.items() if not value and name != "interval"]
    if missing:
        why = "in which there was none" if run else "or --logdir of a run that was disrupted"
        raise GoodputError(f"--predict needs {' and '.join(missing)}, {why}")
    mtbf, save, restart, interval = (value or 0.0 for value in values.values())
    share = run.share_of_steps if run else 1.0
    machine = FailingMachine(mtbf, save, restart, interval, args.announced, share)
    return machine if interval else best(machine)


def best(machine: FailingMachine) -> FailingMachine:
    return replace(machine, interval=machine.BestInterval())


def prediction_table(machine: FailingMachine, step_seconds: float | None) -> tables.Table:
    """The goodput with the interval of a machine, with half and twice of it, and with the best one."""
    cases = {
        "half": replace(machine, interval=machine.interval / 2),
        "as given": machine,
        "twice": replace(machine, interval=machine.interval * 2),
        "best": best(machine),
    }
    rows = [
        [
            name,
            units.duration(case.interval),
            f"{max(1, round(case.interval / step_seconds)):,}" if step_seconds else "",
            units.share(case.Goodput()),
        ]
        for name, case in cases.items()
    ]
    heads = [*tables.words("interval"), *tables.numbers("time", "steps", "predicted goodput")]
    return tables.Table(heads, rows)


if __name__ == "__main__":
    _cli.run(main)
