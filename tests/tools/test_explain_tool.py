"""The command that explains a program."""

import json

import pytest
import tensorflow as tf

from lingvo_moe.core import sharding
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh
from tools import explain

SMALL = "task.repeat=False;task.optimizer=sgd"


@pytest.fixture(scope="module")
def program_file(tmp_path_factory):
    def turned(x):
        return sharding.replicate(tf.tanh(sharding.split(x, 0, 8)))

    path = str(tmp_path_factory.mktemp("program") / "turned.program")
    lower(turned, [TensorSpec((16, 4), "float32")], Mesh.parse("expert:8")).Save(path)
    return path


def test_a_program_file(program_file, tmp_path, capsys):
    outputs = [tmp_path / name for name in ("e.html", "e.json")]
    argv = [f"--program={program_file}", f"--html={outputs[0]}", f"--json={outputs[1]}"]
    assert explain.main(argv) == 0
    said = capsys.readouterr()
    assert "Program 'turned' on mesh expert:8" in said.out
    assert "all-gather" in said.out
    assert "loading TensorFlow and the compiler ..." in said.err
    assert "<svg class='shards'" in outputs[0].read_text()
    assert json.loads(outputs[1].read_text())["exchanges"][0]["kind"] == "all-gather"


def test_wrong_numbers_are_shown_and_end_with_an_error(tmp_path, capsys):
    grid = Mesh.parse("data:2,model:4")

    def row_sums(x, y):
        x, y = (sharding.mesh_split(t, grid, ("data", "model")) for t in (x, y))
        return sharding.mesh_split(tf.einsum("fa,fa->f", x, y), grid, ("model",))

    path = tmp_path / "row_sums.program"
    lower(row_sums, [TensorSpec((16, 16), "float32")] * 2, grid).Save(path)
    assert explain.main([f"--program={path}"]) == 1
    said = capsys.readouterr()
    assert "WRONG NUMBERS" in said.out
    assert "explain: program 'row_sums': XLA's partitioner would compute wrong numbers" in said.err
    assert "Instead: annotate the result with the sharding of the operands' batch" in said.err


def test_an_experiment(capsys, tmp_path):
    path = tmp_path / "tiny.json"
    argv = ["--model=mt.M4Tiny", "--num_devices=4", f"--json={path}"]
    assert explain.main([*argv, f"--model_params_override={SMALL}"]) == 0
    said = capsys.readouterr().out
    assert "Program 'train_step' on mesh expert:4, 4 devices" in said
    assert "lingvo_moe/core/moe/dispatch.py:" in said
    exchanges = json.loads(path.read_text())["exchanges"]
    found = {}
    for e in exchanges:
        if e["reason"] == "reshard":
            key = (e["phase"], e["kind"])
            found[key] = found.get(key, 0) + e["times"]
    # Encoder and decoder have one mixture of experts each: two all-to-alls, and again for gradients.
    assert found == {("forward", "all-to-all"): 4, ("backward", "all-to-all"): 4}
