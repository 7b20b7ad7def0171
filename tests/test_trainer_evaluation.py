"""Evaluation while a run trains: the best checkpoint, early stopping, interruptions, `--max_minutes`, `--mode=eval`.

On the toy task, within this process.
"""

import os
import re
import shutil

import numpy as np
import pytest
import toy_held_out
from processes import free_address, start_python
from trainer_testing import state

from lingvo_moe import trainer
from lingvo_moe.core.base_layer import WeightParams
from lingvo_moe.core.config import registry
from lingvo_moe.core.console.interrupt import TimeLimit
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.checkpoints.run_weights import read_weights
from lingvo_moe.core.engine.loop import train_loop
from lingvo_moe.core.engine.loop.evaluation import Evaluator
from lingvo_moe.core.engine.loop.held_out_watch import read_batches
from lingvo_moe.core.engine.loop.summaries import read_metrics
from lingvo_moe.core.moe.routers.hash import TableInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.runs.run_lock import EVALUATOR, RunLock, is_lock_file
from lingvo_moe.training import evaluating

_OVERRIDE = "task.optimizer.learning_rate.constant_steps=5"


def _train(run, max_steps, *more, override="", model="toy_held_out.Line"):
    parameters = ";".join(filter(None, (_OVERRIDE, override)))
    flags = [f"--model={model}", f"--logdir={run}", f"--max_steps={max_steps}"]
    return trainer.main(
        [*flags, "--engine=tf_graph", f"--model_params_override={parameters}", *more]
    )


def _steps_and_losses(run):
    return [tuple(e) for e in RunDir(run).evaluations.done]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run of 10 steps, evaluated after 4, 8 and 10."""
    run = tmp_path_factory.mktemp("evaluated") / "run"
    assert _train(run, 10) == 0
    return run


@pytest.fixture
def given_losses(monkeypatch):
    """Returns a list; the next evaluations find its losses instead of real ones."""
    losses: list[float] = []

    def evaluated(self, weights, batches):
        return NestedMap(loss=np.float32(losses.pop(0)), examples=np.float32(64))

    monkeypatch.setattr(Evaluator, "__call__", evaluated)
    return losses


def test_the_loss_is_that_of_the_saved_weights_on_the_same_batches(reference):
    """The mean is over all examples, and over those of each group."""
    rows = read_metrics(str(RunDir(reference).held_out_dir))
    assert [row["step"] for row in rows] == [4, 8, 10]
    inputs = toy_held_out.Line().Input().Instantiate()
    with Checkpointer(str(reference / "checkpoints"), read_only=True) as saved:
        for row in rows[1:]:  # 4 has made place
            w = saved.RestoreToNumpy("theta", row["step"])[0].w
            losses = [np.mean((b.batch.x @ w - b.batch.y) ** 2) for b in inputs.HeldOut()]
            assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
            assert row["groups/odd/loss"] == pytest.approx(np.mean(losses[1::2]), rel=1e-4)
            assert row["examples"] == 64 and row["groups/even/examples"] == 32
            # Two batches of equal size in each of two equal groups.
            spread = [np.var(losses[group::2], ddof=1) / 2 for group in (0, 1)]
            assert row["loss_error"] == pytest.approx(np.sqrt(sum(spread)) / 2, rel=1e-3)
    assert _steps_and_losses(reference) == [(row["step"], row["loss"]) for row in rows]
    # Training knows nothing of it.
    assert [row["step"] for row in read_metrics(str(reference / "train"))] == list(range(1, 11))


def test_the_moving_average_is_evaluated_where_there_is_one(tmp_path):
    run = tmp_path / "run"
    assert _train(run, 4, override="task.ema_decay=0.5") == 0
    task = toy_held_out.Line().Task().Set(ema_decay=0.5).Instantiate()
    batches = list(toy_held_out.Line().Input().Instantiate().HeldOut())

    def loss(use_ema):
        with Checkpointer(str(run / "checkpoints"), read_only=True) as saved:
            w = read_weights(saved, task, 4, use_ema).w
        return np.mean([np.mean((b.batch.x @ w - b.batch.y) ** 2) for b in batches])

    ((_, found),) = _steps_and_losses(run)
    assert found == pytest.approx(loss(True), rel=1e-4) != pytest.approx(loss(False), rel=1e-2)
    (row,) = read_metrics(str(RunDir(run).held_out_dir))
    assert row["weights/loss"] == pytest.approx(loss(False), rel=1e-4)


def test_the_best_checkpoint_stays_and_training_stops_early(tmp_path, given_losses, capfd):
    """Two newest checkpoints are kept, one every four steps."""
    run, stop = tmp_path / "run", "train.early_stopping_evals=3"
    given_losses += [3.0, 1.0, 2.0, 1.0, 2.0]
    assert _train(run, 40, override=stop) == 0
    err = capfd.readouterr().err
    assert "step 8: held-out loss 1.0000, best so far" in err
    assert "step 16: held-out loss 1.0000, best 1.0000 at step 8" in err
    assert "step 20: the last 3 evaluations have no lower held-out loss than that of step 8" in err
    assert RunDir(run).steps == [8, 16, 20] and RunDir(run).BestStep("--checkpoint_step") == 8
    assert _train(run, 40, override=stop) == 0
    assert "step 20: the last 3 evaluations" in capfd.readouterr().err
    params = registry.GetParams("toy_held_out.Line", f"{stop};train.max_steps=40")
    assert "step 8" in evaluating._why_done(RunDir(run), 20, params)
    given_losses += [0.5, 0.75]
    assert _train(run, 28, override="train.early_stopping_evals=4") == 0
    assert RunDir(run).steps == [24, 28] and RunDir(run).BestStep("--checkpoint_step") == 24
    assert len(read_metrics(str(run / "train"))) == 28
    assert _train(run, 36, override="train.eval_interval_steps=0") == 0  # evaluated no more
    assert RunDir(run).steps == [24, 32, 36]


def test_a_best_step_is_saved_although_no_checkpoint_is_due(tmp_path, given_losses):
    run = tmp_path / "run"
    given_losses += [2.0, 3.0, 1.0, 4.0]
    assert _train(run, 10, override="train.eval_interval_steps=3") == 0
    assert RunDir(run).steps == [9, 10] and RunDir(run).BestStep("--checkpoint_step") == 9


@pytest.mark.parametrize("at", [8, 10])
def test_killed_while_it_evaluates_nothing_is_lost(reference, tmp_path, monkeypatch, capfd, at):
    """The checkpoint of the step is there, and the run ends with the same state and losses."""
    run, evaluate = tmp_path / "run", Evaluator.__call__
    with monkeypatch.context() as patch:
        evaluated = iter([4, 8, 10])

        def kill(self, weights, batches):
            if next(evaluated) == at:
                raise KeyboardInterrupt
            return evaluate(self, weights, batches)

        patch.setattr(Evaluator, "__call__", kill)
        assert _train(run, 10) == 130
    assert RunDir(run).steps[-1] == at
    assert [step for step, _ in _steps_and_losses(run)] == [s for s in (4, 8) if s < at]
    assert _train(run, 10) == 0
    err = capfd.readouterr().err
    assert ("step 10: train.max_steps=10 is reached" in err) == (at == 10)
    (line,) = (line for line in err.splitlines() if line.startswith(f"step {at}: held-out loss"))
    assert line.endswith(" s)")  # no share of a time in which nothing was trained
    name = "evaluations.json"
    assert (run / name).read_bytes() == (reference / name).read_bytes()
    wanted = state(reference)
    for path, value in state(run).items():
        np.testing.assert_array_equal(value, wanted[path], err_msg=path)


def test_other_batches_begin_the_search_for_the_best_again(reference, tmp_path, capfd):
    run = shutil.copytree(reference, tmp_path / "run")
    assert _train(run, 12, override="train.eval_batches=2") == 0
    told = "the held-out batches are not those of the run's evaluations so far"
    assert told in capfd.readouterr().err
    assert [step for step, _ in _steps_and_losses(run)] == [12]


def test_what_cannot_be_evaluated_is_said(tmp_path, capfd):
    on = "train.eval_interval_steps=2"
    assert _train(tmp_path / "run", 2, override=on, model="toy_task.Line") == 0
    why = "train.eval_interval_steps=2: not evaluated, since Numbers has no held-out examples"
    assert why in capfd.readouterr().err
    assert not (tmp_path / "run" / "evaluations.json").exists()
    stop = f"{on};train.early_stopping_evals=1"
    assert _train(tmp_path / "other", 2, override=stop, model="toy_task.Line") == 2
    assert "train.early_stopping_evals=1: needs held-out data" in capfd.readouterr().err


@pytest.mark.parametrize("there, most, said", [
    (4, 3, "3 held-out batches are evaluated every 2 steps"),
    (4, 60, "all 4 held-out batches (train.eval_batches=60) are evaluated every 2 steps"),
    (0, 8, "not evaluated, since none of the held-out examples fits into a batch"),
])  # fmt: skip
def test_how_much_is_evaluated_is_said(there, most, said, monkeypatch, capsys):
    inputs = toy_held_out.Numbers.Params().Instantiate()
    found = list(inputs.HeldOut())[:there]
    monkeypatch.setattr(toy_held_out.Numbers, "HeldOut", lambda self: iter(found))
    train = registry.TrainParams().Set(eval_interval_steps=2, eval_batches=most)
    assert len(read_batches(inputs, train)) == min(there, most)
    assert said in capsys.readouterr().err


def test_a_run_of_no_steps_saves_its_initial_weights_and_compiles_no_step(tmp_path, capfd):
    run = tmp_path / "run"
    assert _train(run, 0) == 0
    err = capfd.readouterr().err
    assert "step 0: train.max_steps=0 is reached" in err and "compiling" not in err
    assert RunDir(run).steps == [0]
    assert _train(run, 2) == 0
    assert "resuming at step 0" in capfd.readouterr().err
    assert max(RunDir(run).steps) == 2


def test_a_file_that_weights_cannot_begin_with_is_refused_before_anything_is_compiled(
    tmp_path, monkeypatch, capfd
):
    def began(self, params, before=toy_held_out.toy_task.LinearModel.__init__):
        before(self, params)
        table = WeightParams((8,), "V", TableInit(str(tmp_path / "nope.npy")), trainable=False)
        self.CreateVariable("table", table)

    monkeypatch.setattr(toy_held_out.toy_task.LinearModel, "__init__", began)
    assert _train(tmp_path / "run", 2) == 2
    err = capfd.readouterr().err
    assert re.search(r"\.table_file=.*nope.npy: must be a table of tools.report", err), err
    assert "compiling" not in err and not (tmp_path / "run").exists()


def test_what_cannot_be_compiled_leaves_nothing_behind(reference, tmp_path, monkeypatch, capfd):
    """A run that is there, and files of others, stay as they are, TensorBoard's too."""

    def mistaken(self, theta, batch, seed=None):
        raise ValueError("a mistake in FProp")

    old, new, shared = (
        shutil.copytree(reference, tmp_path / "old"),
        tmp_path / "a/new",
        tmp_path / "b",
    )
    shared.mkdir()
    (shared / "notes.txt").write_text("to do")
    (shared / "train").write_text("as well")  # which is in the way of a run
    before = _owned(old)
    monkeypatch.setattr(toy_held_out.toy_task.LinearModel, "FProp", mistaken)
    for run in (old, new, shared):
        assert _train(run, 20) in (1, 2)
        assert "a mistake in FProp" in capfd.readouterr().err or run is shared
    assert not new.parent.exists()
    assert {p.name for p in shared.iterdir()} == {"notes.txt", "train"}
    assert {p: b for p, b in _owned(old).items() if p.name != "time.jsonl"} == {
        p: b for p, b in before.items() if p.name != "time.jsonl"
    }


def test_max_minutes(tmp_path, monkeypatch, capfd):
    run, looks = tmp_path / "run", []

    def over(self):
        looks.append(self.minutes)
        return len(looks) == 3

    monkeypatch.setattr(TimeLimit, "over", property(over))
    assert _train(run, 20, "--max_minutes=0.5") == 0
    said = "--max_minutes=0.5 is over: stopped and saved at step 2; the same command goes on"
    assert said in capfd.readouterr().err
    assert RunDir(run).steps[-1] == 2 and looks == [0.5] * 3


def test_a_step_begins_when_its_batch_is_there(tmp_path, monkeypatch):
    """A process whose input stalls is then behind the others of its job."""
    done = []
    for of, name in ((train_loop.Prefetched, "Await"), (type(train_loop.PACE), "Begin")):
        method = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *a, m=method, n=name: done.append(n) or m(*a))
    assert _train(tmp_path / "run", 2) == 0
    assert "".join(name[0] for name in done) == "A" + "ABA" * 2  # each batch is then taken


# --- --mode=eval


def test_a_job_beside_the_trainer_scores_each_checkpoint(reference, tmp_path, monkeypatch, capfd):
    """It waits for the run and for further steps, though the directory is locked, and ends after the last step."""
    run, files = tmp_path / "run", []

    def pass_time(seconds):
        assert seconds == evaluating.POLL_SECONDS
        files.append(_owned(run))
        assert len(files) < 4
        with RunLock(run) as lock:
            lock.Acquire()
        assert _train(run, 6 * len(files)) == 0

    monkeypatch.setattr(evaluating.time, "sleep", pass_time)
    assert _train(run, 12, "--mode=eval") == 0
    err = capfd.readouterr().err
    assert f"waiting for a run in {run}" in err
    assert "scored step 12, the last one (train.max_steps=12 is reached)" in err
    rows = read_metrics(str(RunDir(run).scores_dir))
    assert [row["step"] for row in rows] == [4, 6, 8, 12]
    trained = {row["step"]: row for row in read_metrics(str(RunDir(run).held_out_dir))}
    for row in rows:
        assert row == pytest.approx(trained[row["step"]], rel=1e-5)
    before = _owned(run)
    with RunLock(run) as lock:
        lock.Acquire()
        assert _train(run, 12, "--mode=eval", "--once") == 0
    assert _owned(run) == before
    assert len((RunDir(run).scores_dir / "metrics.jsonl").read_text().splitlines()) == len(rows)


def _owned(run):
    """The trainer's own files: all but the scores."""
    if not run.exists():
        return {}
    files = (p for p in run.rglob("*") if p.is_file() and "scores" not in p.parts)
    return {p: p.read_bytes() for p in files if not is_lock_file(p.name)}


def test_a_second_evaluator_is_refused(reference, capfd):
    before = _owned(reference)
    with RunLock(reference, holder=EVALUATOR) as lock:
        lock.Acquire()
        for more in ([], ["--once"]):
            assert _train(reference, 10, "--mode=eval", *more) == 2
            said = f"--logdir={reference}: another evaluator (--mode=eval) is at work there (process {os.getpid()}"
            assert said in capfd.readouterr().err
    assert _owned(reference) == before and not (reference / "eval" / "scores").exists()


def _evaluate_while(run, monkeypatch, *events):
    """The status of an evaluator of 12 steps; at its polls these are called, one at each."""
    left = iter(events)
    monkeypatch.setattr(evaluating.time, "sleep", lambda seconds: next(left)())
    status = _train(run, 12, "--mode=eval")
    assert next(left, None) is None
    return status


def _scores(run):
    return [row["step"] for row in read_metrics(str(RunDir(run).scores_dir))]


def test_a_run_that_takes_the_place_of_another_is_read_afresh(
    reference, tmp_path, monkeypatch, capfd
):
    """Steps that were scored in the old run are scored in the new one; parameters are compared again."""
    run, old = shutil.copytree(reference, tmp_path / "run"), tmp_path / "run.before_restart_1"

    def restart():
        assert _train(run, 12, "--restart", override="train.save_interval_steps=5") == 0

    assert _evaluate_while(run, monkeypatch, restart) == 0
    assert _scores(old) == [8, 10] and _scores(run) == [8, 10, 12]
    assert f"the run that was in {run} is there no more" in capfd.readouterr().err

    def restart_with_another_rate():
        override = "task.optimizer.learning_rate.constant_steps=6"
        assert _train(run, 4, "--restart", override=override) == 0

    shutil.rmtree(run / "checkpoints" / "12")  # so that it waits
    assert _evaluate_while(run, monkeypatch, restart_with_another_rate) == 2
    err = capfd.readouterr().err
    assert (
        "with other parameters; give the flags of the trainer" in err
        and "constant_steps : 6" in err
    )
    assert not _scores(run)


def test_a_run_is_scored_and_goes_on_with_its_own_parameters(tmp_path, monkeypatch, capfd):
    """They need not be repeated, and count although the experiment has other ones by now."""
    run, flags = tmp_path / "run", ["--model=toy_held_out.Line", "--engine=tf_graph"]
    flags.append(f"--logdir={run}")
    override = "task.seed=5;train.save_interval_steps=3"
    assert _train(run, 4, override=override) == 0
    capfd.readouterr()
    with monkeypatch.context() as patch:
        make = toy_held_out.Line.Task
        patch.setattr(toy_held_out.Line, "Task", lambda self: make(self).Set(ema_decay=0.5))
        assert trainer.main([*flags, "--mode=eval"]) == 0
        err = capfd.readouterr().err
        assert trainer.main([*flags, "--max_steps=6"]) == 2  # to train is another thing
        assert "> task.ema_decay : 0.0\n< task.ema_decay : 0.5" in capfd.readouterr().err
    said = f"--model_params_override='{_OVERRIDE};{override};train.max_steps=4': from the run in {run}\n"
    assert err.count(said) == 1 and "task.ema_decay=0.0 (today 0.5)" in err
    (scored,) = read_metrics(str(RunDir(run).scores_dir))[-1:]
    (trained,) = read_metrics(str(RunDir(run).held_out_dir))[-1:]
    assert scored == pytest.approx(trained, rel=1e-5)
    assert trainer.main([*flags, "--max_steps=6"]) == 0
    said = f"--model_params_override='{_OVERRIDE};task.seed=5': from the run in {run}\n"
    assert said in capfd.readouterr().err and RunDir(run).steps[-1] == 6
    for mode in ([], ["--mode=eval", "--once"]):
        assert trainer.main([*flags, "--model_params_override=task.seed=6", *mode]) == 2
        assert "> task.seed : 5\n< task.seed : 6" in capfd.readouterr().err
    (run / "experiment.hmac").unlink()  # as of somebody else's run, whose overrides might name code
    assert trainer.main([*flags, "--max_steps=7"]) == 2
    assert "> task.seed : 5" in capfd.readouterr().err


def test_an_evaluator_ends_where_the_newest_command_of_the_trainer_does(
    tmp_path, monkeypatch, capfd
):
    """Commands made the run longer, and shorter, before the evaluator was started and while it waits."""
    run, flags = tmp_path / "run", ["--model=toy_held_out.Line", "--engine=tf_graph"]
    flags.append(f"--logdir={run}")

    def stop_after_two_steps(*more):
        looks = []
        with monkeypatch.context() as patch:
            over = property(lambda _: looks.append(1) or len(looks) == 3)
            patch.setattr(TimeLimit, "over", over)
            assert trainer.main([*flags, "--max_minutes=1", *more]) == 0

    assert _train(run, 4) == 0
    stop_after_two_steps("--max_steps=40", "--model_params_override=train.eval_batches=1")
    assert RunDir(run).Params().train.Get("max_steps") == 40
    capfd.readouterr()
    commands = [
        lambda: stop_after_two_steps(),  # to the end that the experiment has
        lambda: trainer.main([*flags, "--max_steps=8"]),
    ]
    monkeypatch.setattr(evaluating.time, "sleep", lambda seconds: commands.pop(0)())
    assert trainer.main([*flags, "--mode=eval"]) == 0
    err = capfd.readouterr().err
    taken = f"'{_OVERRIDE};train.eval_batches=1;train.max_steps=40'"
    assert f"--model_params_override={taken}: from the run in {run}\n" in err
    assert "scored step 8, the last one (train.max_steps=8 is reached)" in err
    assert not commands and _scores(run)[-2:] == [6, 8]
    damaged = (run / "train_params.txt").read_text().replace("max_steps : 8", "max_steps : 9")
    (run / "train_params.txt").write_text(damaged)
    assert trainer.main([*flags, "--mode=eval"]) == 2
    assert f"{run}/train_params.txt was changed or damaged" in capfd.readouterr().err


def test_a_checkpoint_that_goes_while_it_is_opened(reference, tmp_path, monkeypatch, capfd):
    """Step 10 takes another name as it is opened, as if it had made place for step 12."""
    run = shutil.copytree(reference, tmp_path / "run")
    restore = Checkpointer.RestoreToNumpy

    def gone(self, prefix="", step=None):
        if step == 10:
            (run / "checkpoints" / "10").rename(run / "checkpoints" / "12")
        return restore(self, prefix, step)

    monkeypatch.setattr(Checkpointer, "RestoreToNumpy", gone)
    assert _train(run, 12, "--mode=eval") == 0
    err = capfd.readouterr().err
    assert "step 10: its checkpoint has made place for newer ones" in err
    assert "scored step 12, the last one" in err
    assert _scores(run) == [8, 12]


def test_the_newest_checkpoint_must_be_readable_to_be_scored_once(reference, tmp_path, capfd):
    run = shutil.copytree(reference, tmp_path / "run")
    (run / "checkpoints" / "10" / "files.xxh128").unlink()
    assert _train(run, 10, "--mode=eval", "--once") == 2
    assert "step 10: files.xxh128, the list of its files, is missing" in capfd.readouterr().err
    assert not _scores(run)


# The trainer, whose second process does not find step 8.
_TRAINER = """
import sys
from lingvo_moe import trainer
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer

if "--process_id=1" in sys.argv:
    Checkpointer.Steps = lambda self: [10]
sys.exit(trainer.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_evaluator_of_two_processes(reference, tmp_path):
    """The first one writes; both leave out the step that one of them does not find, and end."""
    run = shutil.copytree(reference, tmp_path / "run")
    job = [f"--coordinator_address={free_address()}", "--num_processes=2", "--num_devices=1"]
    flags = ["--model=toy_held_out.Line", f"--logdir={run}", "--mode=eval", *job, "--max_steps=10"]
    env = {"XLA_FLAGS": None, "JAX_PLATFORMS": None}
    processes = [start_python("-c", _TRAINER, *flags, f"--process_id={i}", env=env) for i in (0, 1)]
    (_, first), (_, second) = (process.communicate(timeout=90) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], first + second
    assert "another process of the job cannot use the checkpoint" in first
    assert "step 8: there is no such checkpoint; there are [10]" in second
    assert "scored step 10, the last one" in first and "step 10:" not in second
    assert _scores(run) == [10]
    (scored,), (*_, trained) = (
        read_metrics(str(place)) for place in (RunDir(run).scores_dir, RunDir(run).held_out_dir)
    )
    assert scored == pytest.approx(trained, rel=1e-5)
