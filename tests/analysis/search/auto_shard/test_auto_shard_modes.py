"""auto_shard as a user meets it: annotations that are kept, strategies as text, notes and errors."""

from collections import Counter
from typing import Any

import auto_shard_functions as functions
import numpy as np
import pytest
import tensorflow as tf
from auto_shard_functions import spec
from refusals import refuses

from lingvo_moe import xla_sharding as xs
from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.machines.ring import ring
from lingvo_moe.analysis.plans.network import mesh_machine
from lingvo_moe.analysis.programs.partitioner.spmd import RESHARD
from lingvo_moe.analysis.search.auto_shard.strategy import Strategy
from lingvo_moe.core.sharding import Mesh, ShardingError

_FOUR = Mesh.parse("device:4")
_EIGHT = Mesh.parse("model:8")
_X = spec(64, 64)


def _random(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).randn(*shape).astype(np.float32)


def _batch_norm(x_BM: tf.Tensor) -> tf.Tensor:
    mean = tf.reduce_mean(x_BM, 0)
    variance = tf.reduce_mean(tf.square(x_BM - mean), 0)
    return (x_BM - mean) * tf.math.rsqrt(variance + 1e-5)


def _submodel(x_BM: tf.Tensor, w_MV: tf.Tensor) -> tf.Tensor:
    """MindSpore's example: BatchNorm().shard(((4, 1),)), then MatMul().shard(((1, 1), (1, 4)))."""
    y = _batch_norm(xs.mesh_split(x_BM, _FOUR, ("device", None)))
    return tf.matmul(xs.replicate(y), xs.mesh_split(w_MV, _FOUR, (None, "device")))


def _plain(x_BM: tf.Tensor, w_MV: tf.Tensor) -> tf.Tensor:
    return tf.matmul(_batch_norm(x_BM), w_MV)


def _with_gradients(fn: Any, x: tf.Tensor, w: tf.Variable) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fn(x, w)
        loss = tf.reduce_sum(y**3)
    return [y, *tape.gradient(loss, [x, w])]


def test_mindspore_s_example_has_one_redistribution_and_its_gradient():
    sharded = xs.auto_shard(_submodel, _FOUR)
    x, w = tf.constant(_random(64, 32)), tf.Variable(_random(32, 128))
    found = sharded.Strategy(x, w)
    assert {t.name: t.mapping for t in found.arguments} == {
        "x_BM": ("device", None),
        "w_MV": (None, "device"),
    }
    (moved,) = [r for r in found.reads if r.collectives]
    assert (moved.made, moved.mapping) == (("device", None), (None, None))
    assert moved.collectives == ("all-gather over device",)
    for got, want in zip(
        _with_gradients(sharded, x, w), _with_gradients(_plain, x, w), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * float(np.max(np.abs(want))))
    # Forward, the program has that all-gather, and the two sums over rows of the normalization.
    explanation = xs.explain(sharded.Program(x, w))
    (exchange,) = [e for e in explanation.exchanges if e.what.reason == RESHARD]
    assert exchange.what.kind == "all-gather" and "xs.replicate(y)" in exchange.line.text
    # What was found is shown beside what the user said.
    (product,) = explanation.Sharding("MatMul")
    assert product.mapping == (None, "device")
    assert found.results[0].mapping == (None, "device")


def test_given_shardings_of_arguments_and_results_are_kept():
    sharded = xs.auto_shard(
        lambda x: tf.nn.relu(x) * 2,
        _EIGHT,
        in_shardings=[("model", None)],
        out_shardings=(None, "model"),
    )
    found = sharded.Strategy(spec(1024, 1024))
    assert (found.arguments[0].mapping, found.results[0].mapping) == (
        ("model", None),
        (None, "model"),
    )
    x = _random(16, 16)
    np.testing.assert_allclose(sharded(x), np.maximum(x, 0) * 2)
    assert Counter(c.kind for c in sharded.Compiled(x).Collectives()) == {"all-to-all": 1}


def test_an_uneven_annotation_inside_leaves_arguments_and_results_whole():
    """Tensors that enter or leave a program divide evenly."""
    sharded = xs.auto_shard(
        lambda x, y: xs.mesh_split(tf.where(x > 0, x, y), _FOUR, ("device",)), _FOUR
    )
    x, y = _random(15), _random(30)[15:]
    found = sharded.Strategy(x, y)
    assert [t.mapping for t in (*found.arguments, *found.results)] == [(None,)] * 3
    np.testing.assert_array_equal(sharded(x, y), np.where(x > 0, x, y))


def test_a_strategy_is_written_down_and_taken_back(tmp_path):
    sizes = spec(1024, 8192), spec(8192, 32768), spec(32768, 8192)
    found = xs.auto_shard(functions.perceptron, _EIGHT).Strategy(*sizes)
    assert "w1_MH[8192, 32768]: -,model" in str(found)
    file = tmp_path / "strategy.json"
    file.write_text(found.Text(), encoding="utf-8")
    again = xs.auto_shard(functions.perceptron, _EIGHT, strategy=file)
    assert again.Strategy(*sizes) == found == Strategy.FromText(found.Text())
    assert again.Strategy(*sizes).Text() == found.Text()
    with pytest.raises(ShardingError, match=r"here x_BM has shape \[8, 8192\]"):
        again.Strategy(spec(8, 8192), *sizes[1:])
    other = xs.auto_shard(
        lambda x_BM, w1_MH, w2_HM: tf.nn.relu(x_BM @ w1_MH) + 1.0, _EIGHT, strategy=found.Text()
    )
    with pytest.raises(ShardingError, match=r"for another function: operation 2 was MatMul"):
        other.Strategy(*sizes)
    with pytest.raises(ShardingError, match="is for mesh model:8, not device:4"):
        xs.auto_shard(functions.perceptron, _FOUR, strategy=found).Strategy(*sizes)


def test_a_limit_of_memory_is_kept_or_what_lacks_is_said():
    """Copies of the weights are fastest for many rows; with less memory some have to be sharded."""

    def layers(x: tf.Tensor, weights: list[tf.Tensor]) -> tf.Tensor:
        for w in weights:
            x = tf.nn.relu(x @ w)
        return x

    sizes = spec(16384, 4096), [spec(4096, 4096)] * 8
    shardings = {"x": ("model", None)}
    free, tight = (
        xs.auto_shard(layers, _EIGHT, in_shardings=shardings, memory_limit=limit).Strategy(*sizes)
        for limit in (None, 1300 << 20)
    )
    assert not any(axis for t in free.arguments[1:] for axis in t.mapping)
    assert tight.num_bytes <= 1300 << 20 < free.num_bytes
    assert tight.seconds > free.seconds
    with pytest.raises(
        ShardingError,
        match=r"no strategy over mesh model:8 keeps memory_limit=1\.0 MiB on a device; every one needs at least .* MiB "
        r"\(of which .*\), .* MiB more",
    ):
        xs.auto_shard(layers, _EIGHT, memory_limit=1 << 20).Strategy(*sizes)


def test_over_a_prime_number_of_devices_everything_is_whole_and_that_is_said():
    sharded = xs.auto_shard(functions.perceptron, Mesh.parse("model:7"))
    x, w1, w2 = _random(8, 16), _random(16, 32), _random(32, 16)
    with pytest.warns(UserWarning, match="nothing is sharded: over mesh model:7 no dimension"):
        found = sharded.Strategy(x, w1, w2)
    assert not any(axis for t in found.arguments for axis in t.mapping)
    np.testing.assert_allclose(sharded(x, w1, w2), functions.perceptron(x, w1, w2), rtol=1e-4)


def test_an_operation_without_a_rule_is_whole_and_that_is_said(monkeypatch):
    plain = ring("no latency", 1e12, 1e12, 1e11, 0.0, 0.0)
    monkeypatch.setattr(mesh_machine, "ACCELERATOR", plain)

    def fn(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.roll(x @ w, 1, axis=0) @ w

    sharded = xs.auto_shard(fn, _EIGHT)
    x, w = _random(64, 32), _random(32, 32)
    with pytest.warns(UserWarning, match="Roll: no rule for Roll; its tensors are replicated"):
        found = sharded.Strategy(x, w)
    rolled = next(t for t in found.operators if t.type == "Roll")
    assert rolled.mapping == (None, None)
    assert any(axis for t in found.operators for axis in t.mapping)
    np.testing.assert_allclose(sharded(x, w), fn(x, w), atol=1e-4)


def test_a_tape_inside_sees_annotated_tensors():
    """A tensor that a tape begins to watch after another operation has read it, annotated."""

    def slope(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        h = x @ w
        before = tf.reduce_sum(h @ w)
        with tf.GradientTape() as tape:
            tape.watch(h)
            y = tf.reduce_sum(tf.square(h @ w))
        return tape.gradient(y, h) + before

    x, w = tf.constant(_random(16, 16)), tf.constant(_random(16, 16))
    sharded = xs.auto_shard(slope, _FOUR, topology="cpu", in_shardings=[("device", None), None])
    np.testing.assert_allclose(sharded(x, w), slope(x, w), rtol=1e-4, atol=1e-3)


@refuses(ShardingError,
    (functions.perceptron, {"differentiate": ["w1_M"]}, r"has no argument 'w1_M' \(did you mean 'w1_MH'"),
    (functions.perceptron, {"differentiate": "w1_MH"}, "has to be a list of names"),
    (functions.perceptron, {"memory_limit": 0}, "memory_limit=0 has to be a number of bytes above 0"),
    (functions.perceptron, {"strategy": '{"a": 1}'}, "is no text of a strategy"),
    (functions.perceptron, {"strategy": "nowhere.json"}, "No such file"),
    (_X, {}, "is no function"),
)  # fmt: skip
def test_wrong_input_is_refused_at_once(fn, options):
    xs.auto_shard(fn, _EIGHT, **options)


@refuses(ShardingError,
    (xs.auto_shard(tf.nn.relu), "no mesh; give auto_shard one"),
    (xs.auto_shard(tf.nn.relu, _EIGHT, topology="v5e:2x2"), PlanError, "fewer than mesh model:8 of 8"),
    (xs.auto_shard(lambda x: xs.manual_region(tf.nn.relu, [("model", None)], ("model", None))(x), _EIGHT),
     "has a manual region"),
)  # fmt: skip
def test_a_function_without_a_strategy_is_refused(sharded):
    sharded.Strategy(_X)


def _with_bias(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.nn.softmax(x @ w + b)


def _tied(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.nn.relu(x @ w) @ tf.transpose(w)))


@pytest.mark.parametrize("fn, shapes", [
    (tf.matmul, ((2048, 1024), (1024, 4096))),
    (functions.perceptron, ((64, 256), (256, 1024), (1024, 256))),
    (functions.perceptron, ((2048, 1024), (1024, 4096), (4096, 1024))),
    (_with_bias, ((512, 1024), (1024, 2048), (2048,))),
    (_tied, ((16384, 512), (512, 2048))),
])  # fmt: skip
@pytest.mark.parametrize("mesh", ["data:2,model:4", "model:8"])
def test_an_estimate_is_the_same_whatever_of_the_strategy_is_given(fn, shapes, mesh):
    """The strategy is given in arguments, in the result, or by annotations inside."""
    mesh, specs = Mesh.parse(mesh), [spec(*shape) for shape in shapes]

    def plain(*args):
        return fn(*args)

    free = xs.auto_shard(plain, mesh, topology="v5e:2x4").Strategy(*specs)
    pins = tuple(t.mapping for t in free.arguments)
    out = free.results[0].mapping

    def annotated(*args):
        return fn(*(xs.mesh_split(x, mesh, pin) for x, pin in zip(args, pins, strict=True)))

    for function, given in [
        *((plain, {"in_shardings": {"args": some}}) for some in _each_alone_and_all(pins)),
        (annotated, {}),
        *([(plain, {"in_shardings": {"args": pins}, "out_shardings": out})] if out else []),
    ]:
        found = xs.auto_shard(function, mesh, topology="v5e:2x4", **given).Strategy(*specs)
        assert found.seconds == pytest.approx(free.seconds, rel=1e-9), given
        assert found.arguments == free.arguments
        if function is plain:
            assert set(found.operators) >= set(free.operators)


def _each_alone_and_all(pins: tuple) -> list[tuple]:
    alone = [tuple(p if i == j else None for j, p in enumerate(pins)) for i in range(len(pins))]
    return [*alone, pins]


def test_by_default_the_gradients_count_that_a_tape_asks_for():
    """Weights by columns need no communication, unless the gradient of the batch is wanted: then they are gathered."""
    mesh = Mesh.parse("model:8")

    def product(x, w):
        return x @ w

    def of_weights(sharded):
        return [r for r in sharded.Strategy(x, w).reads if r.operand == 1 and r.collectives]

    x, w = tf.constant(_random(64, 256)), tf.constant(_random(256, 1024))
    pinned = {"topology": "h100:1x8", "in_shardings": {"w": (None, "model")}}
    sharded = xs.auto_shard(product, mesh, **pinned)
    assert of_weights(sharded)
    with tf.GradientTape() as tape:
        tape.watch(w)
        assert not of_weights(sharded)
    assert not of_weights(sharded)  # without the tape too
    variable = tf.Variable(_random(256, 1024), trainable=False)
    assert xs.auto_shard(product, mesh, **pinned)._Differentiated({"x": x, "w": variable}) == [
        True,
        True,
    ]
    named = xs.auto_shard(product, mesh, differentiate=["w"], **pinned)
    assert named.Strategy(x, w) == sharded.Strategy(x, w)
