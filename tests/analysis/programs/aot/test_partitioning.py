"""The files that XLA dumps about partitioning."""

import os
import tempfile

import pytest
import tensorflow as tf

from lingvo_moe.analysis.programs.aot import aot, partitioning
from lingvo_moe.analysis.programs.aot.partitioning import partition
from lingvo_moe.analysis.programs.hlo.collective_list import count_collectives, parse_collectives
from lingvo_moe.core import sharding
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.compiled_cache import enable_compilation_cache
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.sharding import Mesh

MESH = Mesh.parse("d:8")


def recut(x, w):
    y = sharding.split(x, 0, 8) @ w
    y = tf.identity(tf.nn.relu(y), name="kept")
    return sharding.split(y, 1, 8)


def _program(fn=recut):
    specs = [TensorSpec((16, 8), "float32"), TensorSpec((8, 8), "float32")]
    return lower(fn, specs, MESH, results=AUTO)


def test_the_three_texts_of_a_program():
    found = partition(_program())
    assert "f32[16,8]" in found.before
    assert "sharding={devices=[8,1]" in found.before
    assert count_collectives(found.before) == {}
    assert count_collectives(found.after) == {"all-gather": 1}
    assert count_collectives(found.final) == {"all-gather": 1}


def test_nothing_is_left_behind_and_nothing_said(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    partition(_program())
    assert os.listdir(tmp_path) == []
    assert capfd.readouterr() == ("", "")


def test_a_cache_of_compiled_programs_does_not_hide_it(tmp_path):
    import jax

    was = jax.config.jax_compilation_cache_dir
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        directory = enable_compilation_cache(str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        program = _program()
        for _ in range(2):
            assert count_collectives(partition(program).after) == {"all-gather": 1}
        assert jax.config.jax_compilation_cache_dir == directory
    finally:
        jax.config.update("jax_compilation_cache_dir", was)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def test_one_clear_error_where_nothing_was_written(monkeypatch):
    monkeypatch.setattr(partitioning, "dump_options", lambda _: {})
    with pytest.raises(EngineError, match="XLA wrote nothing down of how it partitioned program"):
        partition(_program())


def test_results_that_no_axis_can_name_are_partitioned_all_the_same():
    def halved(x, w):
        return sharding.split(x @ w, 0, 2), sharding.split(x[:15], 0, 8)

    assert "f32[15,8]" in partition(_program(halved)).before


def test_a_slice_that_is_not_there():
    pytest.importorskip("libtpu")
    found = partition(_program(), topology="v3:2x2")
    assert count_collectives(found.after) == {"all-gather": 1}
    assert "sharding={devices=[8,1]" in found.before
    assert len(aot.devices_of("v3:2x2")) == 8
    with pytest.raises(EngineError, match=r"mesh d:8, of 8 devices, but v3:4x4 has 32"):
        partition(_program(), topology="v3:4x4")


def test_an_asynchronous_collective_has_the_results_of_all_of_its_tensors():
    text = """
  %g = ((f32[4,2]{1,0}, bf16[8]{0}), (f32[8,2]{1,0}, bf16[16]{0})) all-gather-start(%a, %b), dimensions={0}
  %p = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%c), source_target_pairs={{0,1}}
  %i = (f32[4]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%c, %o, %x, %y), source_target_pairs={{0,1}}
"""
    found = [(c.shapes, c.num_bytes) for c in parse_collectives(text)]
    permuted, in_place = ((("f32", (4,)),), 16), ((("f32", (8,)),), 32)
    assert found == [((("f32", (8, 2)), ("bf16", (16,))), 96), permuted, in_place]
