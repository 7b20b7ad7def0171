"""The record of a run's held-out losses: the best step, when training stops, what a damaged file says."""

import math

import pytest

from lingvo_moe.core.runs.evaluations import Evaluation, Evaluations, read_evaluations
from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.core.runs.run_dir import RunDir


def _made(*losses: float) -> Evaluations:
    """Evaluations of steps 10, 20, ..."""
    found = Evaluations("b")
    for number, loss in enumerate(losses, 1):
        found = found.With(10 * number, loss)
    return found


def test_the_best_is_the_lowest_and_of_equal_ones_the_earlier():
    found = _made(3.0, 1.0, math.nan, 1.0, 2.0)
    assert found.best == Evaluation(20, 1.0) and found.without_best == 3
    assert found.BestOf([10, 40, 50]) == Evaluation(40, 1.0)
    assert found.BestOf([30]) is None and _made(math.nan).best is None


def test_a_run_that_goes_on_from_an_earlier_step_forgets_later_ones():
    found = _made(3.0, 1.0, 2.0).UpTo(25)
    assert found == _made(3.0, 1.0)
    assert found.With(20, 2.5) == _made(3.0, 2.5)


@pytest.mark.parametrize("losses, evaluations, stops", [
    ((3.0, 1.0, 2.0), 2, False),
    ((3.0, 1.0, 2.0, 1.0), 2, True),
    ((3.0, 1.0, 2.0, 1.0), 0, False),
    ((math.nan, math.inf), 2, True),
    ((), 1, False),
])  # fmt: skip
def test_when_training_stops(losses, evaluations, stops):
    assert bool(_made(*losses).WhyStopped(evaluations)) == stops


def test_written_and_read(tmp_path):
    run = RunDir(tmp_path)
    assert run.evaluations is None
    found = _made(3.0, 1.0, math.inf)
    run.WriteEvaluations(found)
    read = run.evaluations
    assert read.done[:2] == found.done[:2] and math.isnan(read.done[2].loss)
    content = (tmp_path / "evaluations.json").read_bytes()
    for damaged in (content[:-9], content.replace(b"3.0", b"0.5"), b"[]", b"{}"):
        with pytest.raises(RunDirError, match=r"evaluations.json: was changed or damaged; delete"):
            read_evaluations(tmp_path / "evaluations.json", damaged)


def test_the_best_checkpoint_is_one_that_is_there(tmp_path):
    run = RunDir(tmp_path)
    message = r"--x=best: no checkpoint of .* has a held-out loss: tra"
    with pytest.raises(RunDirError, match=message):
        run.BestStep("--x")
    run.WriteEvaluations(_made(3.0, 1.0, 2.0))
    for step in (10, 30, 35):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    assert run.BestStep("--x") == 30
