"""lm.Tiny in the trainer: it learns, a run that resumes is the undisturbed one, with other stages too."""

import re

import numpy as np
import pytest
from trainer_testing import keep_compiled, losses, state, status, write_corpus

from lingvo_moe.core.engine import engines

pytestmark = pytest.mark.slow

# Micro-batches draw numbers of their own.
PLAIN = "task.dropout=0.0"
STAGES = f"{PLAIN};task.pipeline.stages=2;task.pipeline.micro_batches=2"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("lm")
    data = write_corpus(root / "data")
    (data / "dev").mkdir()
    (data / "dev" / "aa.tsv").write_text((data / "aa.tsv").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(engines, "make_engine", engines.make_engine)  # put back at the end
        keep_compiled()

        def run(name, steps, override=PLAIN, *more):
            flags = ["--model=lm.Tiny", f"--data_dir={data}", f"--logdir={root / name}"]
            flags += [f"--max_steps={steps}", f"--model_params_override={override}"]
            assert status(*flags, *more) == 0
            return root / name

        yield run


def test_it_learns_and_a_run_that_resumes_is_the_undisturbed_one(train):
    whole = train("whole", 20)
    found = losses(whole)
    assert np.mean([found[i] for i in range(17, 21)]) < found[1] - 0.5
    train("resumed", 10)
    resumed = train("resumed", 20)
    assert losses(resumed) == found
    for path, value in state(whole).items():
        np.testing.assert_array_equal(value, state(resumed)[path], err_msg=path)


def test_a_run_goes_on_in_stages(train):
    """Steps 6 to 10 in two stages are those without."""
    train("staged", 5)
    staged = losses(train("staged", 10, STAGES, "--mesh=stage:2,data:1"))
    plain = losses(train("whole", 20))
    assert sorted(staged) == list(range(1, 11))
    assert staged == pytest.approx({step: plain[step] for step in staged}, rel=1e-4)


def test_checkpoints_are_scored_on_held_out_text(train, capfd):
    run = train("whole", 20)
    flags = ["--model=lm.Tiny", f"--logdir={run}", f"--data_dir={run.parent / 'data'}"]
    assert status(*flags, "--mode=eval", f"--model_params_override={PLAIN}") == 0
    found = re.findall(r"step (\d+): held-out loss ([\d.]+)", capfd.readouterr().err)
    assert [step for step, _ in found] == ["10", "15", "20"]
    assert float(found[0][1]) > float(found[1][1]) > float(found[2][1])
