"""auto_shard: the strategies that it finds where the best one is known, and what the programs compute and send."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import auto_shard_functions as functions
import numpy as np
import pytest
import tensorflow as tf
from auto_shard_functions import spec

from lingvo_moe import xla_sharding as xs
from lingvo_moe.analysis.plans.machines.ring import ring
from lingvo_moe.analysis.plans.network import mesh_machine
from lingvo_moe.core import randomness
from lingvo_moe.core.nested_map import flatten, map_structure
from lingvo_moe.core.sharding import Mesh

_EIGHT = Mesh.parse("model:8")


@pytest.fixture
def no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small functions are sharded like large ones."""
    plain = ring("no latency", 1e12, 1e12, 1e11, 0.0, 0.0)
    monkeypatch.setattr(mesh_machine, "ACCELERATOR", plain)


def _mappings(strategy: Any) -> dict[str, Any]:
    return {t.name: t.mapping for t in strategy.arguments}


def _values(tree: Any, seed: int = 0) -> Any:
    rng = np.random.RandomState(seed)
    return map_structure(lambda s: (0.3 * rng.randn(*s.shape)).astype(np.float32), tree)


def _gradients(fn: Callable[..., Any], args: Sequence[Any], by: Sequence[Any]) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch(by)
        y = fn(*args)
        total = tf.reduce_sum(tf.square(y))
    return [y, *tape.gradient(total, by)]


def _check(fn: Callable[..., Any], sharded: Any, specs: Sequence[Any]) -> list[Any]:
    """Values and gradients by all arguments are those of one device; returns the arguments."""
    args = map_structure(tf.constant, _values(list(specs)))
    by = flatten(args)
    for got, want in zip(_gradients(sharded, args, by), _gradients(fn, args, by), strict=True):
        scale = float(np.max(np.abs(want)))
        np.testing.assert_allclose(got, want, atol=1e-5 * scale)
    return args


def _kinds(compiled: Any) -> Counter:
    return Counter(c.kind for c in compiled.Collectives())


def test_over_two_axes_both():
    """Rows are many and layers wide, and the network along `data` is as fast as that along `model`."""
    grid = Mesh.parse("data:2,model:4")
    found = xs.auto_shard(functions.perceptron, grid, differentiate=["w1_MH", "w2_HM"]).Strategy(
        spec(32768, 8192), spec(8192, 32768), spec(32768, 8192)
    )
    got = _mappings(found)
    rows, columns = got["x_BM"][0], got["w1_MH"][1]
    assert {rows, columns} == {"data", "model"}
    assert got["w2_HM"] == (columns, None)


@pytest.mark.usefixtures("no_latency")
def test_wide_layers_need_one_all_reduce_each_way():
    sharded = xs.auto_shard(functions.perceptron, _EIGHT)
    args = _check(functions.perceptron, sharded, [spec(8, 64), spec(64, 256), spec(256, 64)])
    assert _mappings(sharded.Strategy(*args))["w1_MH"] == (None, "model")
    assert _kinds(sharded.Compiled(*args)) == {"all-reduce": 1}
    # The gradient computes the forward pass again.
    assert _kinds(sharded.CompiledGradient(*args)) == {"all-reduce": 2}


def test_a_transformer_is_sharded_as_megatron_s():
    """Twelve layers: heads and hidden units over the devices, one all-reduce after each half of a layer."""
    layers = [functions.block_specs(8192, 64, 128, 32768)] * 12
    sharded = xs.auto_shard(functions.transformer, _EIGHT, differentiate=["layers"])
    found = sharded.Strategy(spec(1, 2048, 8192), layers)
    got = _mappings(found)
    for i in range(12):
        assert got[f"layers[{i}].qkv_MPNK"] == (None, None, "model", None)
        assert got[f"layers[{i}].o_NKM"] == ("model", None, None)
        assert got[f"layers[{i}].wi_MH"] == (None, "model")
        assert got[f"layers[{i}].wo_HM"] == ("model", None)
    moved = [r for r in found.reads if r.collectives]
    assert moved == []
    assert found.search["costs_seconds"] + found.search["solving_seconds"] < 10
    again = xs.auto_shard(functions.transformer, _EIGHT, differentiate=["layers"])
    assert again.Strategy(spec(1, 2048, 8192), layers).Text() == found.Text()


@pytest.mark.usefixtures("no_latency")
def test_one_all_reduce_for_each_half_of_a_layer_each_way():
    layers = [functions.block_specs(64, 8, 8, 256)]
    sharded = xs.auto_shard(functions.transformer, _EIGHT)
    args = _check(functions.transformer, sharded, [spec(1, 16, 64), layers])
    assert _kinds(sharded.Compiled(*args)) == {"all-reduce": 2}
    # Two of the forward pass again, of which the last is not needed, and two of its gradient.
    assert _kinds(sharded.CompiledGradient(*args))["all-reduce"] in (3, 4)


@pytest.mark.usefixtures("no_latency")
def test_experts_get_their_all_to_alls():
    sharded = xs.auto_shard(functions.experts, Mesh.parse("expert:8"))
    args = _check(functions.experts, sharded, functions.experts_specs(8, 16, 8, 4, 32, 64))
    found = _mappings(sharded.Strategy(*args))
    assert {name: mapping[0] for name, mapping in found.items()} == dict.fromkeys(found, "expert")
    assert _kinds(sharded.Compiled(*args)) == {"all-to-all": 2}
    assert _kinds(sharded.CompiledGradient(*args)) == {"all-to-all": 4}


@pytest.mark.usefixtures("no_latency")
def test_a_look_up_with_a_tied_softmax_over_two_axes():
    def language_model(ids_BT: tf.Tensor, table_VM: tf.Tensor, w_MM: tf.Tensor) -> tf.Tensor:
        h = tf.nn.gelu(tf.gather(table_VM, ids_BT) @ w_MM)
        logits = tf.einsum("BTM,VM->BTV", h, table_VM)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(ids_BT, logits)
        return tf.reduce_mean(losses)

    sharded = xs.auto_shard(language_model, Mesh.parse("data:2,model:4"))
    rng = np.random.RandomState(0)
    ids = tf.constant(rng.randint(0, 64, (8, 16)).astype(np.int32))
    weights = [tf.Variable(w) for w in _values([spec(64, 32), spec(32, 32)])]
    got, want = (_gradients(f, [ids, *weights], weights) for f in (sharded, language_model))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(g), tf.convert_to_tensor(w), atol=1e-5)


def test_inside_another_program_it_becomes_a_part_of_it():
    sharded = xs.auto_shard(functions.perceptron, _EIGHT)
    args = _values([spec(8, 16), spec(16, 32), spec(32, 16)])
    outer = xs.shard_function(lambda *args: 2 * sharded(*args), mesh=_EIGHT)
    np.testing.assert_allclose(outer(*args), 2 * sharded(*args), rtol=1e-5)


@pytest.mark.parametrize("mesh", ["model:1", "model:2"])
def test_a_function_may_have_a_tape_of_its_own(mesh, no_latency):
    def gradients(x_BM: tf.Tensor, w_MH: tf.Tensor) -> list[tf.Tensor]:
        return _gradients(tf.matmul, [x_BM, w_MH], [x_BM, w_MH])

    args = [tf.constant(value) for value in _values([spec(8, 16), spec(16, 32)])]
    sharded = xs.auto_shard(gradients, Mesh.parse(mesh))
    for got, want in zip(sharded(*args), gradients(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_tensorflow_s_own_batch_normalization_can_be_sharded(no_latency):
    def normalized(x_BYXI: tf.Tensor, scale_I: tf.Tensor, offset_I: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.compat.v1.nn.fused_batch_norm(x_BYXI, scale_I, offset_I)[0])

    sharded = xs.auto_shard(normalized, Mesh.parse("data:4"))
    args = _check(normalized, sharded, [spec(8, 4, 4, 6), spec(6), spec(6)])
    assert sharded.Strategy(*args).notes == ()


def test_each_device_draws_its_part_of_a_dropout(no_latency):
    def dropped(x_BM: tf.Tensor, w_MH: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        y_BH = tf.nn.relu(x_BM @ w_MH)
        return tf.where(randomness.kept(seed, y_BH.shape, 0.1), y_BH, 0.0)

    sharded = xs.auto_shard(dropped, Mesh.parse("data:4"))
    args = [*map(tf.constant, _values([spec(64, 16), spec(16, 8)])), randomness.make_seed(1, 2)]
    np.testing.assert_allclose(sharded(*args), dropped(*args), rtol=1e-5, atol=1e-6)
    strategy = sharded.Strategy(*args)
    assert strategy.notes == () and any(strategy.arguments[0].mapping)


def test_the_gradient_of_a_strided_slice_is_right(no_latency):
    """Rows are sharded and the slice is not: as TensorFlow writes this gradient, XLA computes it wrongly."""

    def every_third(x_BM: tf.Tensor, w_MH: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x_BM @ w_MH)[::3]

    sharded = xs.auto_shard(every_third, Mesh.parse("model:4"))
    args = _check(every_third, sharded, [spec(64, 16), spec(16, 8)])
    found = sharded.Strategy(*args)
    assert [t.mapping for t in (*found.operators, *found.results)] == [
        ("model", None),
        (None, None),
    ]
