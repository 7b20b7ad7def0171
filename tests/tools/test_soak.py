"""A small soak: a toy run is killed, stopped and restarted, also on other layouts; and what a soak must find."""

import math
import re

import pytest
from processes import run_python

from lingvo_moe.core.files.checked_lines import append_row
from lingvo_moe.core.runs.goodput import account, read_segments
from tools import soak
from tools.soak import Layout, SoakError, compare, layouts, plan_round


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


_LOSSES = {step: 4.0 / step for step in range(1, 61)}


@pytest.mark.parametrize("change, again, exact, said", [
    ({}, {}, 60, ""),
    ({60: 1 / 15 + 1e-7}, {}, 50, ""),
    ({60: 1 / 15 + 1e-7}, {}, 60, "losses of 1 steps differ, first that of step 60"),
    ({60: 1 / 15 + 1e-4}, {}, 50, "losses of 1 steps are more than 1e-05 apart, first that of step 60"),
    ({60: 1 / 15 + 1e-4}, {}, 30, "losses of 1 steps are more than 1e-05 apart, first that of step 60"),
    ({60: None}, {}, 60, "the losses of 1 steps are missing, first that of step 60"),
    ({60: math.nan}, {}, 50, "losses of 1 steps are more than 1e-05 apart, first that of step 60"),
    # A restart does steps 31 to 60 again.
    ({}, {31: 4 / 31 + 1e-7, 59: 0.0}, 60, ""),
    ({}, {50: 4 / 50 + 1e-4}, 60, "losses of 1 steps are more than 1e-05 apart, first that of step 50"),
])  # fmt: skip
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


@pytest.mark.parametrize("exact", [0, 60])
def test_losses_that_are_no_numbers_in_both_runs_are_equal(tmp_path, exact):
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name / "train").mkdir(parents=True)
        for step, loss in (_LOSSES | {7: None}).items():  # as the trainer writes it
            append_row(tmp_path / name / "train" / "metrics.jsonl", {"step": step, "loss": loss})
    assert compare(tmp_path, exact, 60, 1e-5) == 0


def test_the_undisturbed_run_changes_its_layout_where_the_disturbed_one_did(tmp_path):
    args = _args("--rounds=12", "--max_processes=2", "--num_devices=2")
    journal = soak.Journal(tmp_path / "rounds.jsonl", {})
    for begins in (0, 5, 5, 20, 30, 30, 40, 45, 50, 50, 60, 70):
        journal.Add({"begins": begins, "how": "killed"})
    journal.Add({"end": 80})
    parts = soak.layouts_by_step(args, journal)
    assert parts[0] == (Layout(1, 2), 50) and parts[-1][1] == 80
    assert [end for _, end in parts] == sorted({end for _, end in parts})
    of = {number: plan_round(number, args).layout for number in range(8, 12)}
    assert parts[-1][0] == of[11] and {layout for layout, _ in parts[1:]} <= {*of.values()}


def test_a_soak_of_other_flags_is_not_gone_on_with(tmp_path):
    file = tmp_path / "rounds.jsonl"
    soak.Journal(file, {"seed": 1}).Add({"begins": 0, "how": "killed"})
    assert len(soak.Journal(file, {"seed": 1}).rounds) == 1
    with pytest.raises(SoakError, match="holds a soak with --seed=1; give another --output"):
        soak.Journal(file, {"seed": 2})


# tools.soak, whose trainers are forked from this process, so that they need not import anything. A signal comes so many
# steps after a start as it would come seconds.
_FORKED = """
import atexit, math, os, signal, sys
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
import_tensorflow()
import toy_task
from lingvo_moe import trainer
from lingvo_moe.core.engine import pjrt
from lingvo_moe.core.engine.checkpoints import checkpoints
from lingvo_moe.core.engine.loop import train_loop
from lingvo_moe.core.engine.lowering import lowering
from tools import soak

class Forked:
    def __init__(self, command, stdout, stderr, start_new_session):
        self.returncode, self.pid = None, os.fork()
        if not self.pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a new process
            for number in (1, 2):
                os.dup2(stdout.fileno(), number)
            status = trainer.main(command[3:])
            atexit._run_exitfuncs()  # JAX's: processes of a job leave it together
            os._exit(status)

    def poll(self, how=os.WNOHANG):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        return self.poll(0)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(9)

class Job(soak.TrainerJob):
    def HasEnded(self, within=math.inf):
        if within < soak._KILL_SECONDS:
            run = soak.Path(soak.sys.argv[1]) / "disturbed"
            until = max((step for step, _ in soak.losses(run)), default=0) + 1 + within
            while max((step for step, _ in soak.losses(run)), default=0) < until:
                if super().HasEnded(0.01):
                    return True
            return False
        return super().HasEnded(within)

soak.subprocess.Popen, soak.TrainerJob, soak._LOOK = Forked, Job, 0.01
sys.exit(soak.main([f"--output={sys.argv[1]}", *sys.argv[2:]]))
"""


@pytest.mark.slow
def test_six_disruptions(tmp_path):
    """A toy run is killed and stopped six times, after the last ones on other layouts."""
    override = "task.optimizer.learning_rate.constant_steps=5;train.mesh=data:2"
    flags = ["--model=toy_task.Line", "--num_devices=2", "--rounds=6", "--mtbf=4s", "--seed=3"]
    flags.append(f"--model_params_override={override};train.save_interval_steps=5")
    done = run_python("-c", _FORKED, str(tmp_path), *flags)
    logs = "".join(log.read_text()[-2000:] for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert "on the same layout: equal bit for bit" in done.stdout
    assert re.search("losses of [1-9].* steps on other layouts: at most .* apart", done.stdout)
    assert re.search("predicted .*%, measured .*%; .* a restart", done.stdout)
    found = account(read_segments(tmp_path / "disturbed" / "time.jsonl")[0])
    assert (found.segments, found.disruptions) == (7, 6)
