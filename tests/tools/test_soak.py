"""A small soak: a toy run is killed, stopped and restarted, also on other layouts; and what a soak must find."""

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lingvo_moe.core.files.checked_lines import append_row
from lingvo_moe.core.runs.goodput import account, read_segments
from tools import soak
from tools.soak import Layout, SoakError, compare, layouts, plan_round

_TESTS = Path(__file__).parents[1]


def _args(*flags):
    return soak.define_flags().Parse(["--output=x", *flags])


def test_rounds_follow_from_the_seed_and_the_last_third_has_other_layouts():
    args = _args("--rounds=60", "--mtbf=10s", "--max_processes=2", "--announced=0.4")
    rounds = [plan_round(number, args) for number in range(60)]
    assert rounds == [plan_round(number, args) for number in range(60)]
    assert rounds != [plan_round(number, args.With(seed=1)) for number in range(60)]
    assert {r.layout for r in rounds[:40]} == {Layout(1, 4)}
    others = {Layout(1, 1), Layout(1, 2), Layout(2, 1), Layout(2, 2)}
    assert {r.layout for r in rounds[40:]} == others == set(layouts(4, 2))
    assert {r.victim for r in rounds[40:] if r.layout.processes == 2} == {0, 1}
    assert 5 < sum(r.after for r in rounds) / 60 < 15
    assert 12 < sum(r.number == soak.signal.SIGTERM for r in rounds) < 36


def _write_losses(output, name, losses):
    (output / name / "train").mkdir(parents=True)
    for step, loss in losses:
        append_row(output / name / "train" / "metrics.jsonl", {"step": step, "loss": loss})


_LOSSES = {step: 4.0 / step for step in range(1, 61)}


@pytest.mark.parametrize(
    "change, again, exact, said",
    [
        ({}, {}, 60, ""),
        ({60: 1 / 15 + 1e-7}, {}, 50, ""),
        ({60: 1 / 15 + 1e-7}, {}, 60, "losses of 1 steps differ, first that of step 60"),
        (
            {60: 1 / 15 + 1e-4},
            {},
            50,
            "losses of 1 steps are more than 1e-05 apart, first that of step 60",
        ),
        ({60: 1 / 15 + 1e-4}, {}, 30, ""),  # 20 steps after a change of layout: it drifts
        ({60: None}, {}, 60, "the losses of 1 steps are missing, first that of step 60"),
        (
            {60: math.nan},
            {},
            50,
            "losses of 1 steps are more than 1e-05 apart, first that of step 60",
        ),
        # A restart does steps 31 to 60 again.
        ({}, {31: 4 / 31 + 1e-7, 59: 0.0}, 60, ""),
        (
            {},
            {50: 4 / 50 + 1e-4},
            60,
            "losses of 1 steps are more than 1e-05 apart, first that of step 50",
        ),
    ],
)
def test_a_loss_that_differs_or_is_missing_is_found(tmp_path, capsys, change, again, exact, said):
    changed = {**_LOSSES, **change}
    rows = {"undisturbed": [*_LOSSES.items()], "disturbed": [*changed.items()]}
    if again:  # before the restart, they were these
        rows["disturbed"] = [*(_LOSSES | again).items(), *(x for x in changed.items() if x[0] > 30)]
    for name, of_run in rows.items():
        (tmp_path / name / "train").mkdir(parents=True)
        for step, loss in of_run:
            if loss is not None:
                row = {"step": step, "loss": loss}
                append_row(tmp_path / name / "train" / "metrics.jsonl", row)
    assert compare(tmp_path, exact, 60, 1e-5) == bool(said)
    assert said in capsys.readouterr().err


def test_a_soak_of_other_flags_is_not_gone_on_with(tmp_path):
    file = tmp_path / "rounds.jsonl"
    soak.Journal(file, {"seed": 1}).Add({"begins": 0, "how": "killed"})
    assert len(soak.Journal(file, {"seed": 1}).rounds) == 1
    with pytest.raises(SoakError, match="holds a soak with --seed=1; give another --output"):
        soak.Journal(file, {"seed": 2})


@pytest.mark.slow
def test_a_small_soak(tmp_path):
    """Killed, stopped and killed while it trains, the last time on another layout; in processes of their own."""
    overrides = "task.optimizer.learning_rate.constant_steps=5;train.mesh=data:2"
    overrides += ";train.save_interval_steps=5"
    toy = ["--model=toy_task.Line", "--num_devices=2", f"--model_params_override={overrides}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), *sys.path])}

    def run(module, *flags):
        command = [sys.executable, "-m", module, *toy, *flags]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        logs = "".join(log.read_text()[-2000:] for log in tmp_path.glob("*.log"))
        assert done.returncode == 0, done.stderr + logs
        return done.stdout

    began = time.monotonic()
    run("lingvo_moe.trainer", f"--logdir={tmp_path / 'alone'}", "--max_steps=1", "--engine=pjrt")
    start = time.monotonic() - began
    # With this seed signals come 0.9, 1.1 and 1.05 times that late.
    mtbf = f"--mtbf={1.6 * start:.1f}s"
    said = run("tools.soak", f"--output={tmp_path}", "--rounds=3", "--seed=70", mtbf)
    assert "on the same layout: equal bit for bit" in said
    assert re.search("done again, or on another layout first: at most .* apart", said)
    assert re.search("predicted from these .*%, measured .*%", said)
    found = account(read_segments(tmp_path / "disturbed" / "time.jsonl")[0])
    assert (found.segments, found.disruptions) == (4, 3)
