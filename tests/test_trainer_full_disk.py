"""A full disk ends the trainer with one line that names the file, and the same command goes on when there is space.

No file may grow beyond a limit here, which the kernel answers like a full disk, with another error number.
"""

import re
import shutil

import numpy as np
import pytest
import trainer_testing
from damage import full_disk

from lingvo_moe import trainer
from lingvo_moe.core.engine.loop.summaries import read_metrics
from lingvo_moe.core.engine.loop.train_loop import TrainLoop
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

_STEPS = 60


def _steps(self: TrainLoop, on_compiled: object) -> NestedMap:
    """Writes the summaries of a run that trains nothing."""
    for step in range(1, _STEPS + 1):
        self._summaries.Write(step, {"loss": np.float32(step), "x": np.arange(20.0)})
    return NestedMap(status=0, last_step=_STEPS)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return trainer_testing.write_corpus(tmp_path_factory.mktemp("full") / "data")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """Shared, so that only the run's own files are written under a limit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(TrainLoop, "Run", _steps)


def _flags(data_dir, run):
    return trainer_testing.flags(data_dir, run, _STEPS, "--engine=tf_graph")


def test_what_describes_the_run(data_dir, tmp_path, capfd):
    run = tmp_path / "run"
    assert trainer.main(_flags(data_dir, tmp_path / "first")) == 0  # fills the cache
    capfd.readouterr()
    with full_disk(20_000):
        assert trainer.main(_flags(data_dir, run)) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line == f"error: [Errno 27] File too large: '{run / 'vocab/source.model'}'"
    assert not TextRunDir(run).exists and list((run / "vocab").iterdir()) == []
    assert trainer.main(_flags(data_dir, run)) == 0
    assert TextRunDir(run).vocabs == TextRunDir(tmp_path / "first").vocabs


def test_tokenised_text(data_dir, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    assert trainer.main(_flags(data_dir, tmp_path / "first")) == 0
    (shards,) = (tmp_path / "cache/lingvo_moe").glob("shards-*")
    shutil.rmtree(shards)
    capfd.readouterr()
    with full_disk(500):
        assert trainer.main(_flags(data_dir, run)) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: [Errno 27] File too large: ")
    assert "aa.lengths" in line
    assert not shards.exists() and not run.exists()
    assert trainer.main(_flags(data_dir, run)) == 0


def test_summaries(data_dir, tmp_path, capfd, monkeypatch):
    run = tmp_path / "run"

    def on_a_full_disk(self, on_compiled):
        with full_disk(20_000):
            return _steps(self, on_compiled)

    with monkeypatch.context() as patch:
        patch.setattr(TrainLoop, "Run", on_a_full_disk)
        assert trainer.main(_flags(data_dir, run)) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: {run / 'train'}: TensorBoard's files cannot be written (")
    space = r"; make space, then the same command goes on \(\S*test_trainer_full_disk\.py:\d+ in _steps: .*\)"
    assert "File too large" in line and re.search(space + r"\Z", line)
    written = (run / "train/metrics.jsonl").read_bytes()
    assert written.endswith(b"}\n") and 0 < written.count(b"\n") < _STEPS
    monkeypatch.setattr("lingvo_moe.trainer.has_begun", lambda _: True)  # by its checkpoint
    monkeypatch.setattr("lingvo_moe.training.same_run.has_begun", lambda _: True)
    assert trainer.main(_flags(data_dir, run)) == 0
    assert [row["step"] for row in read_metrics(str(run / "train"))] == [*range(1, _STEPS + 1)]
