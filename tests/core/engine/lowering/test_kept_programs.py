"""A lowered program is used again exactly where all that determines it is the same; B row, M feature."""

import dataclasses
import os
import time

import jax
import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.console import command
from lingvo_moe.core.engine import kept_programs
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.step import Step

_MESH = Mesh.parse("data:8")
_STATE = NestedMap(w=TensorSpec((8,), "float32", ("data",)), step=TensorSpec((), "int32"))


class _Tracing:
    """A step that counts how often it is traced."""

    def __init__(self):
        self.count = 0

    def __call__(self, state, x_BM):
        self.count += 1
        loss = tf.reduce_sum(x_BM * state.w)
        return NestedMap(w=state.w + 1.0, step=state.step + 1), NestedMap(loss=loss)

    def Step(self, **changes):
        specs = _STATE, TensorSpec((4, 8), "float32", (None, "data"))
        text = "type/lingvo_moe.core.x/Y\nsize : 8\n"
        return dataclasses.replace(Step("step", self, specs, donate=(0,), text=text), **changes)


pytestmark = pytest.mark.usefixtures("kept_programs_directory")


def _run(step, mesh=_MESH, known_faults="error"):
    """The results of a step, and the hash of its program."""
    run = PjrtEngine(mesh, jax.devices()[: mesh.size], known_faults).BuildStep(step)
    state = NestedMap(w=np.arange(8, dtype=np.float32), step=np.int32(3))
    state, metrics = run(state, np.ones((4, 8), np.float32))
    return np.asarray(state.w), int(state.step), float(metrics.loss), run.program.hash


_RESULTS = _STATE, NestedMap(loss=TensorSpec((), "float32"))


@pytest.mark.parametrize("results", [None, _RESULTS])
def test_the_same_step_is_traced_once(results):
    first, second = _Tracing(), _Tracing()
    found = _run(first.Step(results=results)), _run(second.Step(results=results))
    assert (first.count, second.count) == (1, 0)
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    again = _Tracing()  # lowered without the cache
    assert _run(again.Step(results=results, text=""))[-1] == found[0][-1] and again.count == 1


_OTHERS = {
    "text": lambda patch: {"text": "type/lingvo_moe.core.x/Y\nsize : 16\n"},
    "name": lambda patch: {"name": "other"},
    "specs": lambda patch: {"arg_specs": (_STATE, TensorSpec((4, 8), "float32"))},
    "donated": lambda patch: {"donate": ()},
    "package": lambda patch: patch.setattr(kept_programs, "packages", lambda: ["jax-9.dist-info"]),
    "Python": lambda patch: patch.setattr(kept_programs.sys, "version", "4.0"),
    "variable": lambda patch: patch.setenv("TF_ENABLE_ONEDNN_OPTS", "7"),
    "source": lambda patch: patch.setattr(kept_programs, "code_digest", lambda *_: "ab"),
    "class": lambda patch: {"text": "type/lingvo_moe.core.x/Y\ntype/my.module/Y\n"},
    "result": lambda patch: {"results": _RESULTS},
    "program": lambda patch: patch.setattr(command, "_runs", []),
}


@pytest.mark.parametrize("what", _OTHERS)
def test_anything_else_is_traced_again(what, monkeypatch):
    first, other = _Tracing(), _Tracing()
    _run(first.Step())
    changes = _OTHERS[what](monkeypatch) or {}
    _run(other.Step(**changes))
    assert (first.count, other.count) == (1, 1)


def test_on_another_mesh_and_where_faults_may_be_it_is_traced_again():
    first, smaller, warned = _Tracing(), _Tracing(), _Tracing()
    _run(first.Step())
    _run(smaller.Step(), Mesh.parse("data:4"))
    _run(warned.Step(), known_faults="warn")
    assert (first.count, smaller.count, warned.count) == (1, 1, 1)


def test_a_damaged_entry_is_made_again(kept_programs_directory, capsys):
    first, second, third = _Tracing(), _Tracing(), _Tracing()
    _run(first.Step())
    (file,) = kept_programs_directory.glob("lowered-*")
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:100] + b"x" + whole[101:]):
        file.write_bytes(damaged)
        _run(second.Step())
        assert f"{file} was changed or damaged" in capsys.readouterr().err
    _run(third.Step())
    assert (second.count, third.count) == (2, 0)


def test_the_digest_of_code_follows_every_file(tmp_path):
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "b.py"
    seen = set()
    later = time.time() + 60
    for name, content in (("b.py", "x = 1\n"), ("b.py", "x = 2\n"), ("c.py", "x = 2\n")):
        (tmp_path / "a" / name).write_text(content)
        seen.add(kept_programs.code_digest(tmp_path, later))
    file.rename(tmp_path / "b.py")
    (tmp_path / ".#b.py").symlink_to("user@host.1")  # of an editor
    seen.add(kept_programs.code_digest(tmp_path, later))
    assert len(seen) == 4 and "" not in seen


def test_code_that_changed_since_the_process_began_is_not_trusted(tmp_path, monkeypatch):
    """The process may have imported it before; times of modification can be set back, those of a change cannot."""
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    os.utime(file, (0, 0))
    assert kept_programs.code_digest(tmp_path, time.time() - 1) == ""
    assert kept_programs.code_digest(tmp_path, time.time() + 1) != ""
    monkeypatch.setattr(kept_programs, "_ROOT", tmp_path)
    monkeypatch.setattr(kept_programs, "_MARGIN", 2.0)
    tracing = _Tracing()
    _run(tracing.Step()), _run(tracing.Step())
    assert tracing.count == 2
