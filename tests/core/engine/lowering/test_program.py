"""Programs as files: the same program in any process, without TensorFlow; damage is an error."""

import os

import pytest
import tensorflow as tf
from processes import run_python

from lingvo_moe.core import sharding
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.program import Program, ProgramError, normalized_text
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh

MESH = Mesh.parse("expert:8")


def scale_and_loop(state, batch):
    x = sharding.shard_letters(batch.x, "BM", {"B": "expert"})
    # A loop: TensorFlow numbers the functions of its body by a counter of the process.
    _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.nn.relu(y) + x), (0, x))
    return NestedMap(w=state.w + tf.reduce_sum(y)), NestedMap(total=tf.reduce_sum(y))


def _lower(fn=scale_and_loop):
    state = NestedMap(w=TensorSpec((8, 2), "float32", ("expert", None)))
    batch = NestedMap(x=TensorSpec((8, 2), "float32", ("expert", None)))
    return lower(fn, [state, batch], MESH, donate=(0,))


@pytest.fixture(scope="module")
def program():
    return _lower()


def test_a_saved_program_is_the_same_program(program, tmp_path):
    path = str(tmp_path / "programs" / "step.program")
    program.Save(path)
    loaded = Program.Load(path)
    assert loaded.hash == program.hash
    # Specs and structures survive exactly.
    assert loaded.signature.args == program.signature.args
    assert loaded.signature.results == program.signature.results
    assert os.listdir(tmp_path / "programs") == ["step.program"]


def test_the_hash_does_not_depend_on_what_was_traced_before(program):
    for _ in range(3):
        tf.function(lambda x: tf.while_loop(lambda i: i < x, lambda i: (i + 1,), (0,)))(2)
    again = _lower()
    assert (again.hash, again.names_hash) == (program.hash, program.names_hash)


def test_other_names_leave_the_hash_and_have_one_of_their_own(program):
    def scoped(state, batch):
        with tf.name_scope("encoder"):
            return scale_and_loop(state, batch)

    scoped.__name__ = scale_and_loop.__name__  # of the program, a part of the hash
    renamed = _lower(scoped)
    assert renamed.hash == program.hash
    assert renamed.names_hash != program.names_hash


def test_names_of_functions_are_normalized_and_targets_of_calls_are_not():
    text = 'func.func private @body_17(%a) {\n call @body_17\n custom_call @Sharding loc("x")\n}'
    assert (
        normalized_text(text)
        == "func.func private @fn0(%a) {\n call @fn0\n custom_call @Sharding\n}"
    )


_RUN_WITHOUT_TENSORFLOW = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            raise ImportError("TensorFlow must not be needed here")
sys.meta_path.insert(0, Block())
import numpy as np
from lingvo_moe.core.engine.devices import request_cpu_devices
request_cpu_devices(8)
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.nested_map import NestedMap
program = Program.Load(sys.argv[1])
compiled = PjrtEngine(program.mesh).Compile(program)
state, metrics = compiled(
    NestedMap(w=np.zeros((8, 2), np.float32)), NestedMap(x=np.ones((8, 2), np.float32))
)
print(program.hash, float(metrics.total), float(state.w[7, 1]), len(state.w.devices()))
"""


def test_a_program_runs_in_another_process_without_tensorflow(program, tmp_path):
    path = str(tmp_path / "step.program")
    program.Save(path)
    out = run_python("-c", _RUN_WITHOUT_TENSORFLOW, path)
    assert out.returncode == 0, out.stderr
    digest, total, w, devices = out.stdout.split()
    assert digest == program.hash
    assert (float(total), float(w), devices) == (64.0, 64.0, "8")


@pytest.mark.parametrize("damage, match", [
    (lambda b: b[: len(b) // 2], "was cut short"),
    (lambda b: b[:25], "was cut short"),
    (lambda b: b + b"x", "was cut short or has grown"),
    (lambda b: b[:-200] + bytes([b[-200] ^ 1]) + b[-199:], "are damaged"),
    (lambda b: b"", "no program file"),
])  # fmt: skip
def test_damaged_files(program, tmp_path, damage, match):
    path = tmp_path / "p"
    program.Save(str(path))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ProgramError, match=match) as error:
        Program.Load(str(path))
    assert str(path) in str(error.value)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(program, tmp_path, monkeypatch):
    path = tmp_path / "p"
    program.Save(str(path))
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        program.Save(str(path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["p"]
