"""The engine that the trainer chooses without --engine."""

import importlib
from types import SimpleNamespace

import jax
import pytest
from trainer_testing import losses, status

from lingvo_moe import trainer
from lingvo_moe.core.config import registry
from lingvo_moe.core.console.interrupt import TimeLimit
from lingvo_moe.core.engine import engines
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.runs.run_lock import RunLock
from lingvo_moe.core.runs.time_record import TimeRecord
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.training.flags import parse_flags


@pytest.mark.parametrize(("flags", "devices", "platform", "engine"), [
    ([], 1, "cpu", "tf_graph"),
    ([], 8, "cpu", "pjrt"),
    ([], 1, "gpu", "pjrt"),
    (["--num_devices=1"], 8, "cpu", "tf_graph"),
    (["--num_devices=2"], 1, "cpu", "pjrt"),
    (["--mesh=expert:1"], 1, "cpu", "pjrt"),
    (["--num_processes=2"], 1, "cpu", "pjrt"),
])  # fmt: skip
def test_the_fastest_engine(flags, devices, platform, engine, monkeypatch):
    one = SimpleNamespace(platform=platform)
    monkeypatch.setattr(jax, "devices", lambda: [one] * devices)
    assert trainer.fastest_engine(parse_flags(["--model=mt.M4Tiny", *flags])) == engine


@pytest.fixture
def toy_engine():
    """The file of an engine, which registers itself until the test ends."""
    yield importlib.import_module("toy_engine")
    del engines.ENGINES["toy"]


def test_an_engine_of_one_file_outside_the_package_trains(tmp_path, toy_engine):
    """It registers itself; the trainer asks it what it can do."""
    found = {}
    for engine in ("tf_graph", "toy"):
        run = tmp_path / engine
        assert (
            status(
                "--model=toy_task.Line", f"--logdir={run}", f"--engine={engine}", "--max_steps=2"
            )
            == 0
        )
        found[engine] = losses(run)
    assert found["toy"] == pytest.approx(found["tf_graph"]) and len(found["toy"]) == 2
    assert status("--model=toy_task.Line", "--logdir=x", "--engine=toy", "--num_devices=2") == 2
    assert status("--model=toy_task.Line", "--logdir=x", "--engine=toy", "--num_processes=2") == 2
    with pytest.raises(EngineError, match="'toy' is that of another engine"):
        engines.Register(toy_engine.ToyEngine)


@pytest.mark.parametrize("engine, flags, mesh, line", [
    ("tf_graph", [], "expert:1",
     "--engine=tf_graph, the default on one CPU device without --mesh; "
     "mesh expert:1 (train.mesh=expert:8, resized to the devices)"),
    ("pjrt", ["--num_devices=8"], "expert:8",
     "--engine=pjrt, the default for several devices, GPUs, TPUs and with --mesh; mesh expert:8"),
])  # fmt: skip
def test_the_engine_and_the_mesh_are_said_with_reasons(engine, flags, mesh, line):
    args = parse_flags(["--model=mt.M4Demo", *flags])
    params = registry.GetParams("mt.M4Demo")
    job = trainer.Job(args, params, params, "", engine, TimeLimit(), TimeRecord())
    assert job.MachineLine(Mesh.parse(mesh)) == line


def test_a_start_that_goes_on_with_a_run_is_recorded_before_anything_is_loaded(tmp_path):
    file, others = tmp_path / "time.jsonl", [["--restart"], ["--mode=eval"], ["--process_id=1"]]
    flags = ["--model=mt.M4Demo", f"--logdir={tmp_path}", "--data_dir=x"]

    def starts(*more):
        trainer.begun_record(parse_flags([*flags, *more]))
        return file.read_text().count('"begin"') if file.exists() else 0

    assert starts() == 0 and not list(tmp_path.iterdir())  # no run is there
    file.write_text("another program's")
    assert starts() == 0 and file.read_text() == "another program's"
    (tmp_path / "experiment.json").touch()
    assert starts() == 1
    assert [starts(*more) for more in others] == [1, 1, 1]
    with RunLock(tmp_path) as lock:
        lock.Acquire()  # a trainer is at work: this start will be refused
        assert starts() == 1
    assert starts() == 2
