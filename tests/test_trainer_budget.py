"""Runs that end well: the rate decays to where the run ends, by its steps or by its budget. On the toy task."""

import functools
import json

import pytest
import toy_held_out  # noqa: F401 (registers the experiment)

from lingvo_moe import trainer
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.loop import train_loop
from lingvo_moe.core.engine.loop.budget import Budget
from lingvo_moe.core.engine.loop.summaries import read_metrics

_RATE = "task.optimizer.learning_rate"
_WSD = f"{_RATE}=wsd;{_RATE}.value=0.1;{_RATE}.decay_share=0.5"
_EXAMPLES = 16  # of a step


def _train(run, *overrides, max_steps=1000):
    override = ";".join((_WSD, "train.eval_interval_steps=0", *overrides))
    flags = ["--model=toy_held_out.Line", f"--logdir={run}", f"--max_steps={max_steps}"]
    return trainer.main([*flags, "--engine=tf_graph", f"--model_params_override={override}"])


def _rates(run):
    return {row["step"]: row["learning_rate"] for row in read_metrics(str(run / "train"))}


def _decayed(first, last):
    """The rates of the steps from `first` on, the first of the decay, to the last."""
    n = last - first
    return {first + 1 + i: pytest.approx(0.1 * (1 - (i / n) ** 0.5)) for i in range(n)}


def _stable(steps):
    return {step: pytest.approx(0.1) for step in range(1, steps + 1)}


def test_a_run_that_is_prolonged_decays_again_where_it_ends(tmp_path):
    run = tmp_path / "run"
    assert _train(run, max_steps=6) == 0
    assert _rates(run) == _stable(3) | _decayed(3, 6)
    assert _train(run, max_steps=20) == 0
    assert _rates(run) == _stable(3) | _decayed(3, 6) | {
        step: pytest.approx(0.1) for step in range(7, 11)
    } | _decayed(10, 20)


def test_a_run_ends_where_so_many_examples_were_trained_on(tmp_path, capsys):
    run = tmp_path / "run"
    assert _train(run, f"train.max_units={8 * _EXAMPLES}") == 0
    assert "step 8: train.max_units=128 is used up" in capsys.readouterr().err
    rates = _rates(run)
    assert max(rates) == 8
    assert {step: rates[step] for step in range(5, 9)} == _decayed(4, 8)
    with Checkpointer(str(run / "checkpoints"), read_only=True) as saved:
        assert saved.ReadExtra(8)["used"]["units"] == 8 * _EXAMPLES
    # A job that scores its checkpoints knows that it is over.
    assert _train(run, f"train.max_units={8 * _EXAMPLES}") == 0
    assert "step 8: train.max_units=128 is used up" in capsys.readouterr().err


def test_a_checkpoint_between_two_summaries_has_all_that_was_used(tmp_path):
    run, seldom = tmp_path / "run", "train.summary_interval_steps=100"
    assert _train(run, seldom, "train.max_units=96", max_steps=20) == 0  # saves after step 4
    with Checkpointer(str(run / "checkpoints"), read_only=True) as saved:
        assert saved.ReadExtra(4)["used"]["units"] == 4 * _EXAMPLES
        assert saved.LatestStep() == 6


def test_on_several_devices_another_end_is_the_same_program(tmp_path):
    run = tmp_path / "run"
    override = (
        f"--model_params_override={_WSD};train.eval_interval_steps=0;train.num_micro_batches=2"
    )
    flags = ["--model=toy_held_out.Line", f"--logdir={run}", "--mesh=data:8", override]
    hashes = []
    for last in (6, 20):
        assert trainer.main([*flags, f"--max_steps={last}"]) == 0
        hashes.append(json.loads((run / "program.json").read_text())["hash"])
    assert hashes[0] == hashes[1]
    again = {step: pytest.approx(0.1) for step in range(7, 11)}
    assert _rates(run) == _stable(3) | _decayed(3, 6) | again | _decayed(10, 20)


def test_a_run_ends_after_so_many_cpu_seconds(tmp_path, monkeypatch, capsys):
    clock = iter(range(10_000))
    monkeypatch.setattr(train_loop, "Budget", functools.partial(Budget, clock=lambda: next(clock)))
    run = tmp_path / "run"
    # The clock is read when a step is counted, and before and after evaluations: a step takes two seconds.
    assert _train(run, "train.max_cpu_seconds=18") == 0
    assert "step 10: train.max_cpu_seconds=18 is used up" in capsys.readouterr().err
    assert {step: rate for step, rate in _rates(run).items() if step > 5} == _decayed(5, 10)
