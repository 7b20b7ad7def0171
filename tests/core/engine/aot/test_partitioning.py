"""The files that XLA dumps about partitioning, and the record of the source line of each operation."""

import os
import tempfile

import pytest
import tensorflow as tf
from gpu_compiler import needs_gpu_compiler

from lingvo_moe.core import sharding
from lingvo_moe.core.engine.aot import aot, partitioning
from lingvo_moe.core.engine.aot.partitioning import partition
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.collectives import count_collectives
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


# --- dumps


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


def test_too_few_devices():
    program = lower(lambda x: x, [TensorSpec((16,), "float32")], Mesh.parse("d:16"))
    with pytest.raises(EngineError, match="needs 16 devices"):
        partition(program)


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


@needs_gpu_compiler
def test_a_cluster_that_is_not_there():
    found = partition(_program(), topology="h100:1x8")
    assert count_collectives(found.after) == count_collectives(found.final) == {"all-gather": 1}
    assert "sharding={devices=[8,1]" in found.before


# --- source lines


def _text(sources, name):
    line = sources.Line(name)
    return line and line.text


def test_operations_know_their_lines():
    sources = _program().sources
    assert _text(sources, "Relu") == 'y = tf.identity(tf.nn.relu(y), name="kept")'
    assert _text(sources, "XlaSharding_1") == "return sharding.split(y, 1, 8)"
    assert _text(sources, "no such operation") is None
    assert str(sources.Line("Relu")).endswith(
        f"test_partitioning.py:{recut.__code__.co_firstlineno + 2}"
    )
    assert sources.Line("Relu").function == "recut"


def test_what_passes_a_value_on_and_what_annotates():
    sources = _program().sources
    assert sources.Same("kept") == ["kept", "Relu"]
    assert sources.Same("Relu") == ["Relu"]
    assert sources.Annotated("XlaSharding") == "x"
    assert sources.Annotated("Relu") == ""


def test_operations_of_gradients_know_what_they_are_the_gradient_of():
    def gradient(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(recut(x, w))
        return tape.gradient(loss, w)

    sources = _program(gradient).sources
    grads = {n: sources.Forward(n) for n in sources.names() if n.startswith("gradient_tape/")}
    assert grads["gradient_tape/ReluGrad"] == "Relu"
    # Of two annotations, the gradient of the second comes first.
    assert grads["gradient_tape/XlaSharding"] == "XlaSharding_1"
    assert _text(sources, "gradient_tape/XlaSharding") == "return sharding.split(y, 1, 8)"
    products = [f for n, f in grads.items() if n.split("/")[-1].startswith("MatMul")]
    assert set(products) == {"matmul"}
    assert _text(sources, "gradient_tape/ReluGrad") == _text(sources, "Relu")


def test_bodies_of_loops_and_branches_are_known():
    def looped(x, w):
        def body(i, x):
            return i + 1, tf.cond(i > 1, lambda: tf.tanh(x), lambda: tf.sin(x))

        return tf.while_loop(lambda i, _: i < 3, body, (0, x @ w))[1]

    sources = _program(looped).sources
    for name in ("Tanh", "Sin"):
        (found,) = [n for n in sources.names() if n.split("/")[-1] == name]
        assert "tf.cond" in _text(sources, found)


def test_plumbing_is_passed_over():
    def annotated(x, w):
        return sharding.shard_letters(tf.nn.relu(x @ w), "BM", {"B": "d"})

    sources = _program(annotated).sources
    lines = {str(sources.Line(name)) for name in sources.names() if sources.Line(name)}
    first = annotated.__code__.co_firstlineno + 1
    user = {line for line in lines if line.endswith(f"test_partitioning.py:{first}")}
    assert user
    assert not [line for line in lines if "lingvo_moe/core/" in line]


def test_tracing_is_as_it_was_afterwards():
    def gradients():
        x = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x) ** 2
        return float(tape.gradient(y, x))

    before = gradients()
    _program()
    assert gradients() == before
