"""Steps that are skipped, since their loss or gradient is not finite: counted, and the end of a run that only skips."""

import numpy as np
import pytest
import toy_task

from lingvo_moe import trainer
from lingvo_moe.core.engine.checkpoints.checkpoint_rotation import Rotation
from lingvo_moe.core.runs.run_dir import RunDir

_RATE = "task.optimizer.learning_rate"
_TOO_HIGH = f"{_RATE}=constant;{_RATE}.value=1e30"


def _train(run, max_steps, override, *more):
    flags = [f"--logdir={run}", f"--max_steps={max_steps}", "--engine=tf_graph", *more]
    if _RATE not in override:
        override = f"{_RATE}.constant_steps=5;{override}"
    return trainer.main(
        ["--model=toy_held_out.Line", *flags, f"--model_params_override={override}"]
    )


@pytest.fixture
def not_finite(monkeypatch):
    """Returns a set; the batches of these steps have a number that is not finite."""
    steps, made = set(), toy_task._Batches.__next__

    def spoilt(self):
        batch = made(self)
        if self._made in steps:
            batch.x[0, 0] = np.nan
        return batch

    monkeypatch.setattr(toy_task._Batches, "__next__", spoilt)
    return steps


def test_a_run_that_only_skips_ends_with_its_newest_good_checkpoint(tmp_path, capfd):
    """The first step makes weights of 1e30; the checkpoint after it does not take the place of the one before."""
    run, often = tmp_path / "run", "train.save_interval_steps=1;train.save_max_to_keep=1"
    assert _train(run, 100, f"{_TOO_HIGH};{often}") == 1
    err = capfd.readouterr().err
    assert (
        "error: steps 2 to 9 were all skipped, since their loss or gradient was not finite "
        "(train.max_skipped_steps=8); the newest checkpoint from which a step succeeded is that of step 0: begin from "
        f"it, with --init_from={run} --init_from_step=0, another --logdir and a lower learning rate"
    ) in err
    assert "8 of the 9 steps of the run were not finite, and were skipped" in err
    assert RunDir(run).steps == [0, 1]
    better = f"--init_from={run}", "--init_from_step=0"
    assert _train(tmp_path / "better", 4, "train.max_skipped_steps=1", *better) == 0
    assert "skipped" not in capfd.readouterr().err
    assert _train(run, 100, f"{_TOO_HIGH};{often}") == 1  # the same command
    assert "steps 2 to 9 were all skipped" in capfd.readouterr().err
    assert RunDir(run).steps == [0, 1]


@pytest.mark.parametrize("most, interval, ends", [(3, 1, 7), (4, 5, 10), (0, 1, 0)])
def test_so_many_in_a_row_end_a_run(tmp_path, not_finite, capfd, most, interval, ends):
    """They are looked for at summaries, of which the first step has one; 0 is never."""
    not_finite |= {2, *range(5, 13)}
    every = f"train.summary_interval_steps={interval};train.save_interval_steps=100;train.eval_interval_steps=0"
    status = _train(tmp_path / "run", 13, f"train.max_skipped_steps={most};{every}")
    err = capfd.readouterr().err
    if not ends:
        assert status == 0 and "9 of the 13 steps of the run were not finite" in err
        return
    assert status == 1 and f"error: steps 5 to {ends} were all skipped" in err
    assert f"{ends - 3} of the {ends} steps of the run were not finite" in err
    assert RunDir(tmp_path / "run").steps == [0]


def test_a_run_that_skipped_from_the_beginning(tmp_path, not_finite, capfd):
    not_finite |= set(range(1, 20))
    assert _train(tmp_path / "run", 20, "") == 1
    assert "steps 1 to 8 were all skipped" in (err := capfd.readouterr().err)
    assert "no step succeeded from any checkpoint that is kept: begin again" in err


def test_a_checkpoint_waits_for_a_step_that_is_not_skipped(tmp_path, not_finite, capfd):
    """The newest checkpoint is good, but the last step is saved in any case."""
    not_finite |= {4, 5, 8, 10}
    assert _train(tmp_path / "run", 10, "train.save_max_to_keep=9;train.eval_interval_steps=0") == 0
    assert RunDir(tmp_path / "run").steps == [0, 6, 9, 10]
    not_finite |= {11, 12}
    capfd.readouterr()
    assert _train(tmp_path / "run", 14, "train.max_skipped_steps=2") == 1
    err = capfd.readouterr().err
    assert "error: steps 11 to 12 were all skipped" in err and "is that of step 9: " in err
    assert "6 of the 12 steps of the run were not finite" in err


def test_what_stays_beside_the_newest():
    rotation = Rotation(2)

    def kept(*steps):
        return [step for step in steps if step not in rotation.Leaving(steps)]

    assert kept(0, 1, 2, 3) == [2, 3]
    rotation.best = 1
    assert kept(0, 1, 2, 3) == [1, 2, 3]
    rotation.before = 1
    assert kept(0, 1, 2, 3) == [0, 1, 2, 3]
    rotation.before, rotation.best = 3, None
    assert kept(0, 1, 2, 3) == [2, 3]
    rotation.before = 2
    assert kept(0, 1, 2, 3) == [1, 2, 3]
