"""Runs that go on where another one stood: a branch of a run, and a model that grows out of a smaller one.

On a toy task.
"""

import shutil

import numpy as np
import pytest
import toy_growing  # noqa: F401 (registers the experiment)
from trainer_testing import losses, state

from lingvo_moe import trainer
from lingvo_moe.core.console.interrupt import TimeLimit
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.loop.summaries import read_metrics
from lingvo_moe.core.runs.run_dir import RunDir

_RATE = "task.optimizer.learning_rate"
_WSD = f"task.optimizer=adam;{_RATE}=wsd;{_RATE}.value=0.1;{_RATE}.decay_share=0.5"


def _train(run, max_steps, *overrides, flags=()):
    override = ";".join((_WSD, "train.eval_interval_steps=0", *overrides))
    command = ["--model=toy_growing.Line", "--engine=tf_graph", f"--logdir={run}"]
    command += [f"--max_steps={max_steps}", f"--model_params_override={override}", *flags]
    return trainer.main(command)


def _saved(run, step):
    with Checkpointer(str(run / "checkpoints"), read_only=True) as saved:
        return saved.RestoreToNumpy("", step)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 10 steps, with checkpoints after 8 and 10."""
    path = tmp_path_factory.mktemp("growing") / "run"
    assert _train(path, 10) == 0
    return path


def _branch(run, to, max_steps, *overrides):
    flags = [f"--init_from={run}", "--init_from_state", "--init_from_step=8"]
    return _train(to, max_steps, *overrides, flags=flags)


def test_a_branch_goes_on_as_the_run_did(run, tmp_path):
    branch = tmp_path / "branch"
    assert _branch(run, branch, 10) == 0
    before = losses(run)
    assert losses(branch) == {step: before[step] for step in (9, 10)}
    for path, value in state(run).items():
        np.testing.assert_array_equal(state(branch)[path], value, err_msg=path)
    assert RunDir(branch).began_from["state"]


def test_a_branch_decays_from_where_it_begins(run, tmp_path):
    branch = tmp_path / "branch"
    assert _branch(run, branch, 16) == 0
    rates = [row["learning_rate"] for row in read_metrics(str(branch / "train"))]
    np.testing.assert_allclose(rates, 0.1 * (1 - np.sqrt(np.arange(8) / 8)), rtol=1e-6)


def test_a_branch_that_would_end_before_it_begins_is_refused(run, tmp_path, capsys):
    assert _branch(run, tmp_path / "branch", 8) == 2
    assert "from step 8 of" in (err := capsys.readouterr().err)
    assert "ends at train.max_steps=8; give --max_steps more than 8" in err
    assert not (tmp_path / "branch" / "experiment.json").exists()


def test_a_model_grows_out_of_a_smaller_one_in_one_command(tmp_path, capsys):
    run, dense = tmp_path / "run", tmp_path / "run-dense"
    override = "train.upcycle_at=4;train.save_max_to_keep=9"
    assert _train(run, 10, override) == 0
    err = capsys.readouterr().err
    assert "step 4: train.upcycle_at=4 is reached" in err
    assert f"goes on from {dense} at step 4, out of whose smaller model this one grew" in err
    assert list(losses(dense)) == [1, 2, 3, 4] and list(losses(run)) == [5, 6, 7, 8, 9, 10]
    (small, before), (large, after) = _saved(dense, 4), _saved(run, 4)
    assert after == before  # the place in the data, and what was used of the budget
    assert (small.step, large.step) == (4, 4)
    np.testing.assert_array_equal(large.theta.w, small.theta.w)
    assert not large.theta.v.any() and not any(slot.any() for slot in large.slots.v.Flatten())
    for name, slot in small.slots.w.items():
        assert slot.any()
        np.testing.assert_array_equal(large.slots.w[name], slot)
    rates = [row["learning_rate"] for at in (dense, run) for row in read_metrics(str(at / "train"))]
    want = [0.1] * 5 + list(0.1 * (1 - np.sqrt(np.arange(5) / 5)))
    np.testing.assert_allclose(rates, want, rtol=1e-6)
    assert _train(run, 12, override) == 0  # it is not grown again
    assert max(losses(run)) == 12
    # A branch of it does not grow again.
    branch = tmp_path / "branch"
    flags = [f"--init_from={run}", "--init_from_state", "--init_from_step=10"]
    assert _train(branch, 12, override, flags=flags) == 0
    before = losses(run)
    assert losses(branch) == {step: before[step] for step in (11, 12)}


@pytest.mark.parametrize("state", [[], ["--init_from_state"]])
def test_killed_before_its_first_checkpoint_a_run_begins_from_its_source_all_the_same(
    run, tmp_path, capsys, monkeypatch, state
):
    new, end = tmp_path / "new", 12 if state else 0
    with monkeypatch.context() as patch:

        def kill(*_):
            raise KeyboardInterrupt

        patch.setattr(Checkpointer, "Save", kill)
        flags = [f"--init_from={run}", "--init_from_step=8", *state]
        assert _train(new, end, flags=flags) == 130
    assert RunDir(new).began_from["step"] == 8 and not RunDir(new).steps
    for lost, status in ((["manifest.sha256", "experiment.hmac"], 2), (["manifest.sha256"], 0)):
        other = shutil.copytree(new, tmp_path / f"without{len(lost)}")
        for name in lost:  # as by a kill while it is described
            (other / name).unlink()
        assert _train(other, end) == status
        err = capsys.readouterr().err
        source = " ".join([f"--init_from={run} --init_from_step=8", *state])
        if status:
            assert f"error: --logdir: the run in {other}, " in err and source in err
            continue
        assert f"{source}: from the run in {other}, which was ended before its first" in err
        first = min(RunDir(other).steps)
        assert first == (8 if state else 0)
        np.testing.assert_array_equal(_saved(other, first)[0].theta.w, _saved(run, 8)[0].theta.w)
    assert _train(new, 0, flags=["--restart"]) == 0
    assert RunDir(new).began_from is None


def test_a_model_that_was_to_grow_does_not_begin_without_its_smaller_one(
    tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TimeLimit, "over", property(lambda self: True))
        assert _train(run, 10, "train.upcycle_at=4", flags=["--max_minutes=1"]) == 0
    assert not run.exists() and not capsys.readouterr().err.count("error")
    assert _train(run, 10) == 2
    err = capsys.readouterr().err
    assert (
        f"the run there was to grow out of that in {run}-dense; give --model_params_override="
        in err
    )
    assert "train.upcycle_at=4 to go on" in err and not run.exists()
    assert _train(run, 10, "train.upcycle_at=4") == 0
    assert RunDir(run).began_from["grown"] and max(losses(run)) == 10


@pytest.mark.parametrize("overrides, flags, message", [
    (["train.upcycle_at=20"], [], "train.upcycle_at=20: must be less than train.max_steps=20"),
    (["train.upcycle_at=2", "task.wide=False"], [], "train.upcycle_at=2: needs a model with"),
    (["train.upcycle_at=2"], ["--init_from={run}"], "leave one of the two out"),
    (["task.ema_decay=0.9"], None, "--init_from_state: {run} has another state, e.g. ema.v"),
    (["input.batch_size=8"], None, "--init_from_state: {run} has other data"),
    ([], ["--init_from_state"], "--init_from_state goes with --init_from"),
])  # fmt: skip
def test_refusals(run, tmp_path, capsys, overrides, flags, message):
    if flags is None:
        flags = ["--init_from={run}", "--init_from_state"]
    try:
        status = _train(tmp_path / "new", 20, *overrides, flags=[f.format(run=run) for f in flags])
    except SystemExit as e:
        status = e.code
    assert status == 2
    assert message.format(run=run) in capsys.readouterr().err
