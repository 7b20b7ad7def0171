"""The task contract: a toy task trains, resumes, is inspected and planned, and nothing of `tasks/` is imported."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import toy_task
from processes import run_python

from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
from lingvo_moe.core.engine.checkpoints.run_weights import read_weights

pytestmark = pytest.mark.slow

_DRIVER = """
import json, sys
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
import_tensorflow()
import toy_task
from lingvo_moe import trainer
from lingvo_moe.analysis.plans import step_plan
run, common = sys.argv[1], ["--model=toy_task.Line", "--mesh=data:8"]
override = "train.summary_interval_steps=1;task.optimizer.learning_rate.constant_steps=1"
train = [*common, f"--logdir={run}", "--num_devices=8", f"--model_params_override={override}"]
assert trainer.main([common[0], "--mode=inspect_params"]) == 0
assert trainer.main([*common, "--mode=inspect_model"]) == 0
assert trainer.main([*train, "--max_steps=4"]) == 0
assert trainer.main([*train, "--max_steps=6"]) == 0
assert trainer.main([*train, "--max_steps=6", "--data_dir=here"]) == 2
averaged = [*train[:-1], f"--model_params_override={override};task.ema_decay=0.5"]
averaged += [f"--logdir={run}_averaged", f"--init_from={run}", "--max_steps=2"]
assert trainer.main(averaged) == 0
request = step_plan.Request("toy_task.Line", "v3:2x2", override, mesh="data:8")
plan = step_plan.make_plan(request, None)
print("PLAN", json.dumps(plan))
print("IMPORTED", [m for m in sys.modules if m.startswith(("lingvo_moe.tasks", "params"))])
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The run's directory, and the output of the process."""
    run = tmp_path_factory.mktemp("toy") / "run"
    found = run_python("-c", _DRIVER, str(run))
    assert found.returncode == 0, found.stderr
    return run, found.stdout, found.stderr


def test_the_framework_imports_no_task(done):
    assert "IMPORTED []" in done[1]


def test_what_a_run_does_before_its_first_step_is_shown(done):
    words = r"^(compiling the|compiled the|initialising|making|running|step [0-9]+)"
    shown = re.findall(words, done[2], re.MULTILINE)
    compiled, first = ["compiling the", "compiled the"], ["making", "running"]
    new = [*compiled, "initialising", *first, *(f"step {i}" for i in (1, 2, 3, 4))]
    resumed = [*compiled, *first, "step 5", "step 6"]
    assert shown[: len(new) + len(resumed)] == new + resumed
    assert f"written: {done[0]}, up to step 4\nnext: tensorboard --logdir={done[0]}\n" in done[2]


def test_it_is_a_whole_task_of_at_most_sixty_lines_which_the_page_on_writing_shows():
    text = Path(toy_task.__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    page = Path(toy_task.__file__).resolve().parents[1] / "docs/writing.md"
    assert text in page.read_text(encoding="utf-8")


def test_it_is_inspected(done):
    assert "task.optimizer.learning_rate" in done[1]
    assert "total: 1 variables, 8 parameters" in done[1]
    assert re.search(r"total +16.0 FLOP +100.0%", done[1])
    assert "a training step: 768 FLOP for 16 examples" in done[1]


def test_it_trains_and_resumes(done):
    run, _, errors = done
    rows = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    last = rows[-1]
    assert last["examples"] == 16 and last["examples_per_second"] > 0
    assert last["model_flops_per_second"] == pytest.approx(48 * last["examples_per_second"])
    assert 0 < last["utilisation"] < 1
    assert "resuming at step 4" in errors and " examples/s" in errors
    assert json.loads((run / "experiment.json").read_text())["files"] == []
    assert "--data_dir=here: toy_task.Line reads no directory of data" in errors


def test_a_run_with_a_moving_average_begins_from_it(done):
    """The average starts with the weights that the run begins with, and is read in their place."""
    run = done[0]
    with Checkpointer(str(run / "checkpoints"), read_only=True) as saved:
        before = saved.RestoreToNumpy("theta")[0].w
        task = toy_task.Line().Task().Set(ema_decay=0.5).Instantiate()
        with pytest.raises(CheckpointError, match="'ema'"):
            read_weights(saved, task, use_ema=True)
        with pytest.raises(CheckpointError, match=r"--use_ema: the run in .* keeps no moving aver"):
            read_weights(saved, toy_task.Line().Task().Instantiate(), use_ema=True)
    with Checkpointer(f"{run}_averaged/checkpoints", read_only=True) as saved:
        for use_ema in (False, True):
            np.testing.assert_array_equal(read_weights(saved, task, 0, use_ema).w, before)
        after = read_weights(saved, task).w
        average = read_weights(saved, task, use_ema=True).w
    # After the first update the average is the weights; the second one moves it by nine tenths.
    assert 0 < np.abs(average - after).max() < np.abs(after - before).max()


def test_it_is_planned(done):
    (line,) = [line for line in done[1].splitlines() if line.startswith("PLAN ")]
    plan = json.loads(line.removeprefix("PLAN "))
    assert plan["memory"]["fits"] and plan["batch"] == {"examples": 16}
    assert plan["time"]["examples_per_second"] > 0 and plan["time"]["budget_examples"] == 0
    assert {row["kind"] for row in plan["collectives"]} == {"all-reduce"}
    ran = json.loads((done[0] / "program.json").read_text())
    assert plan["program_hash"] == ran["hash"]  # the very program that ran
