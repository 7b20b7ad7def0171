"""Programs from files, as a GPU machine without TensorFlow runs them; on a CPU here."""

import json

import numpy as np
import pytest
from processes import run_python

from benchmarks import moe_layer_worker
from benchmarks.gpu import layer, programs, runs
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.engines import make_engine
from lingvo_moe.core.engine.loop.evaluation import Evaluator
from lingvo_moe.core.engine.loop.steps import initial_state, train_step
from lingvo_moe.core.sharding import Mesh

_RATE = "task.optimizer.learning_rate"
_OF_RUNS = f"{_RATE}=wsd;{_RATE}.value=0.03;{_RATE}.warmup_steps=2"
SIZE = {"groups": 2, "group_size": 8, "model_dim": 8, "hidden_dim": 16}
# No TensorFlow: importing it fails.
_WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = None
from benchmarks.gpu import {module}
sys.exit({module}.main(sys.argv[1:]))
"""


def test_programs_from_files_run_without_tensorflow(tmp_path):
    sizes = [f"--{name}={value}" for name, value in SIZE.items()]
    flags = ["--experts=4", "--kinds=index,dense", "--formats=bfloat16", *sizes]
    assert programs.main([f"--output={tmp_path}", *flags]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dense-E4-bfloat16.program",
        "index-E4-bfloat16.program",
        "manifest.json",
    ]
    flags = ["--rounds=2", "--steps=2", "--ceiling=32", f"--output={tmp_path / 'out.json'}"]
    assert "Not run on a GPU." in _without_tensorflow("layer", f"--programs={tmp_path}", *flags)
    points = json.loads((tmp_path / "out.json").read_text())["points"]
    assert [p["kind"] for p in points] == ["matmul", "index", "dense"]
    assert all(p["seconds"] > 0 and len(p["rounds"]) == 2 for p in points)
    # Two experts a token cost as much as the dense layer, which is twice as wide.
    assert points[1]["flops"] == points[2]["flops"] == 3 * 2 * 2 * 2 * 16 * 8 * 16
    step = layer._program_step(
        tmp_path / "dense-E4-bfloat16.program", "dense", SIZE | {"num_experts": 4}
    )
    theta, data = moe_layer_worker.arguments("dense", SIZE | {"num_experts": 4})
    expected = np.maximum(data.x @ theta.wi, 0) @ theta.wo
    closest = min(
        np.abs(np.asarray(leaf, np.float32) - expected).max()
        for leaf in step()
        if leaf.shape == expected.shape
    )
    assert closest < 0.05 * np.abs(expected).max()


def test_programs_that_are_half_replaced_have_no_manifest(tmp_path, monkeypatch):
    def fails(kind, size):
        raise ValueError("cannot be lowered")

    (tmp_path / "manifest.json").write_text("of the programs before")
    monkeypatch.setattr(programs, "_lower", fails)
    assert programs.main([f"--output={tmp_path}"]) == 1
    assert not (tmp_path / "manifest.json").exists()


def test_programs_train_without_tensorflow_as_the_trainer_does(tmp_path):
    data, files = tmp_path / "data", tmp_path / "programs"
    (data / "dev").mkdir(parents=True)
    lines = [f"line {n} " + "word " * (n % 9) for n in range(300)]
    (data / "books.txt").write_text("\n".join(lines[20:]))
    (data / "dev" / "books.txt").write_text("\n".join(lines[:20]))
    override = f"{_OF_RUNS};task.num_layers=1;input.cache_dir={tmp_path / 'cache'}"
    flags = ["--model=lm.Tiny", f"--data_dir={data}", "--batches=1", f"--output={files}"]
    assert runs.main([*flags, f"--model_params_override={override}"]) == 0
    output = tmp_path / "curves.json"
    wanted = f"--programs={files}", f"--output={output}", "--points=10,20", "--seeds=7"
    _without_tensorflow("train", *wanted)
    result = json.loads(output.read_text())
    (run,) = result["runs"]
    assert [point["step"] for point in run["curve"]] == [10, 20]
    # The second point's branch decays from step 18 on; its last losses are those of steps 11 to 20.
    losses, held_out = _losses(f"{override};input.data_dir={data}", last=20, stable=18)
    assert run["curve"][1]["held_out_loss"] == pytest.approx(held_out, rel=1e-4)
    assert run["curve"][1]["train_loss"] == pytest.approx(np.mean(losses[18:]), rel=1e-4)
    assert result["unit"] == "tokens" and result["parameters"] > 0 and result["flops"] > 0


def _losses(override: str, last: int, stable: int) -> tuple[list[float], float]:
    """The losses of a run of the trainer's own programs, at a stable rate and then decayed; and the held-out loss."""
    params = registry.GetParams("lm.Tiny", override)
    task, inputs = params.task.Instantiate(), params.input.Instantiate().Prepare()
    engine = make_engine("pjrt", Mesh.parse("data:1"))
    step = engine.BuildStep(train_step(task, inputs))
    state = initial_state(task, engine, 7)
    batch = next(iter(inputs))
    losses = []
    for number in range(last):
        if number == stable:
            state.last_step = np.int32(last)
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return losses, float(Evaluator(task, inputs, engine)(state.theta, inputs.HeldOut()).nll)


def _without_tensorflow(module: str, *flags: str) -> str:
    """Runs a command of benchmarks.gpu where TensorFlow cannot be imported; returns what it prints."""
    code = _WITHOUT_TENSORFLOW.format(module=module)
    done = run_python("-c", code, *flags, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    return done.stdout
