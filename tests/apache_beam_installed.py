"""Marks tests that need Apache Beam, which is an optional requirement; and what stands for it in others."""

import importlib.util
from typing import Any

import pytest
from stand_ins import Through

from lingvo_moe.core.console.flags import Flags

needs_beam = pytest.mark.skipif(
    importlib.util.find_spec("apache_beam") is None,
    reason="needs Apache Beam: pip install --no-deps -r requirements-beam.txt",
)

# By the number of workers: in this process, in threads, in processes.
MODES = {1: "in_memory", 2: "multi_processing", 4: "multi_threading"}


def runner_flags(workers: int) -> list[str]:
    """The flags of a command that choose Beam's runner on this machine, with so many workers."""
    options = f"direct_num_workers={workers}", f"direct_running_mode={MODES[workers]}"
    return ["--runner=FnApiRunner", *(f"--runner_option={option}" for option in options)]


def _with_beam(args: Flags, runner: Any, *_: Any) -> int:
    print(args.Values(), runner)
    return 0


# For StandIns: the commands run on no runner, installed or not.
NO_BEAM: dict[str, Any] = {
    "lingvo_moe.tasks.text.preparing.beam:BeamRunner.Check": None,
    "tools.translate:_with_beam": Through(_with_beam),
}
A_CORPUS = ("--input=lines.txt", "--output=out", "--runner=FnApiRunner")
