"""GPipe for cells of different shapes: values and gradients are those of the cells one after another."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same
from pipeline_toys import Dense, WithExtras, cells, make, step

from lingvo_moe.core import randomness
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline import gpipe_loops
from lingvo_moe.core.pipeline.layers import PipeliningLayer, SeqLayer
from lingvo_moe.core.pipeline.stage_vectors import by_path, from_paths
from lingvo_moe.core.sharding import Mesh

ROWS = 16
SEED = np.array([3, 4], np.int32)
RNG = np.random.RandomState(0)
X = RNG.randn(ROWS, 5).astype(np.float32)
MASK = (RNG.rand(ROWS) > 0.3).astype(np.int32)


def _splits(mesh):
    return {
        "weight_split": {"Z": "stage"} if "stage" in mesh else {},
        "activation_split": {"B": "data"} if "data" in mesh else {},
    }


def _pipelined(num, mesh, **params):
    return make(PipeliningLayer, num_micro_batches=num, **_splits(mesh), **params)


def _moved(of, to, values):
    """Values in the structure of one layer's variables in that of another's."""
    return from_paths(to.VariableSpecs(), by_path(of.VariableSpecs(), values))


def _plain(layer, theta, args, fn=step):
    """The result on one device, by TensorFlow alone."""
    return run_single(fn(layer), [theta, args], jit_compile=False)


def _run(layer, theta, args, mesh="", fn=step):
    if not mesh:
        return run_single(fn(layer), [theta, args]), None
    rows = "data" if "data" in mesh else None
    splits = [SimpleNamespace(split=(rows,) + (None,) * (x.ndim - 1)) for x in args]
    specs = [layer.VariableSpecs(), splits]
    return run_sharded(fn(layer), [theta, args], Mesh.parse(mesh), specs)


@pytest.fixture(scope="module")
def plain():
    layer = make(SeqLayer)
    theta = run_single(layer.InitTheta, [SEED])
    return layer, theta, _plain(layer, theta, [X, MASK])


def _assert_equal(layer, found, plain, rtol=1e-5):
    want = plain[2]
    for name in ("y", "loss", "dx"):
        assert_same(found[name], want[name], rtol)
    grads = by_path(layer.VariableSpecs(), found.grads)
    assert_same(grads, by_path(plain[0].VariableSpecs(), want.grads), rtol, floor=0.0)


def test_values_and_gradients_are_those_of_the_layers_in_sequence(plain, monkeypatch):
    # Whatever buffers hold where a stage has no micro-batch changes nothing.
    monkeypatch.setattr(gpipe_loops, "_UNUSED", float("nan"))
    layer = _pipelined(8, "stage:4,data:2")
    theta = _moved(plain[0], layer, plain[1])
    found, collectives = _run(layer, theta, [X, MASK], "stage:4,data:2")
    _assert_equal(layer, found, plain)
    _check_collectives(collectives)


def _check_collectives(collectives):
    # Forward one for activations and one for int32 masks, backward one; in the loops' bodies.
    assert collectives["collective-permute"] == 3
    lines = re.findall(r".* collective-permute\(.*", collectives.hlo)
    assert all("/while/" in line for line in lines), lines
    directions = [re.search(r"pipeline\.(\w+)", line)[1] for line in lines]
    assert sorted(directions) == ["backward", "forward", "forward"]
    assert not collectives["all-gather"] and not collectives["all-to-all"]
    # Gradients of the packed weights are added up over rows once, after the loop.
    packed = re.findall(r".* all-reduce\(.*", collectives.hlo)
    assert not [line for line in packed if "/while/" in line]


def test_rows_over_one_axis_and_copies_along_another():
    two = {"cell_tpl": cells(sizes=(5, 4, 2))}
    seq = make(SeqLayer, **two)
    theta = run_single(seq.InitTheta, [SEED])
    splits = {"weight_split": {"Z": "stage"}, "activation_split": {"B": "model"}}
    layer = make(PipeliningLayer, num_micro_batches=4, **two, **splits)
    args = [SimpleNamespace(split=("model", None)), SimpleNamespace(split=("model",))]
    found, collectives = run_sharded(
        step(layer),
        [_moved(seq, layer, theta), [X, MASK]],
        Mesh.parse("stage:2,data:2,model:2"),
        [layer.VariableSpecs(), args],
    )
    _assert_equal(layer, found, (seq, theta, _plain(seq, theta, [X, MASK])))
    _check_collectives(collectives)


def test_float64_agrees_to_rounding(monkeypatch):
    """There are as many micro-batches as rows, whose size is given, and the stages run one after another."""
    monkeypatch.setattr(gpipe_loops, "_UNUSED", float("nan"))
    x = RNG.randn(ROWS, 5)
    layer = make(SeqLayer, dtype="float64")
    theta = run_single(layer.InitTheta, [SEED])
    want = _plain(layer, theta, [x, MASK])
    pipelined = make(PipeliningLayer, micro_batch_size=1, dtype="float64")
    found = _run(pipelined, _moved(layer, pipelined, theta), [x, MASK])[0]
    assert found.dx.dtype == np.float64
    _assert_equal(pipelined, found, (layer, theta, want), rtol=1e-12)


class _Nested(Dense):
    """Takes and returns a NestedMap with a None in it, with rows in dimension 1."""

    def FProp(self, theta, given):
        y = tf.tanh(tf.einsum("TBI,IO->TBO", given.x, theta.w) + theta.b)
        return NestedMap(x=y, none=given.none, ids=given.ids + 1)


def test_nested_maps_with_none_and_another_batch_dimension():
    mesh = "stage:2,data:2"
    ids = RNG.randint(0, 9, (3, ROWS)).astype(np.int32)
    x = RNG.randn(3, ROWS, 5).astype(np.float32)

    def run(layer):
        def fn(theta, x, ids):
            with tf.GradientTape() as tape:
                tape.watch([x, *theta.Flatten()])
                out = layer.FProp(theta, NestedMap(x=x, ids=ids, none=None))
                loss = tf.reduce_sum(tf.square(out.x))
            assert out.none is None
            *grads, dx = tape.gradient(loss, [*theta.Flatten(), x])
            return NestedMap(x=out.x, ids=out.ids, dx=dx, grads=theta.Pack(grads))

        return fn

    two = cells(_Nested, (5, 4, 2))
    seq = SeqLayer.Params().Set(name="seq", cell_tpl=two).Instantiate()
    theta = run_single(seq.InitTheta, [SEED])
    want = run_single(run(seq), [theta, x, ids], jit_compile=False)
    p = PipeliningLayer.Params().Set(name="seq", cell_tpl=two, batch_dim=1)
    layer = p.Set(num_micro_batches=4, **_splits(mesh)).Instantiate()
    theta = _moved(seq, layer, theta)
    splits = [layer.VariableSpecs(), (None, "data", None), (None, "data")]
    found, _ = run_sharded(run(layer), [theta, x, ids], Mesh.parse(mesh), splits)
    np.testing.assert_array_equal(found.ids, ids + 2)
    assert_same([found.x, found.dx], [want.x, want.dx])
    grads = by_path(layer.VariableSpecs(), found.grads)
    assert_same(grads, by_path(seq.VariableSpecs(), want.grads))


def _with_extras(layer):
    """Outputs, extras and gradients of a loss with the extras in it."""

    def run(theta, args):
        seed = randomness.make_seed(7, 8)
        trained = [
            w for w, s in zip(theta.Flatten(), layer.VariableSpecs().Flatten()) if s.trainable
        ]
        with tf.GradientTape() as tape:
            tape.watch(trained)
            (y,), extras = layer.FPropWithExtras(theta, tuple(args), seed)
            losses = [extras[f"c{i}"].loss for i in range(2)]
            loss = tf.reduce_sum(tf.square(y)) + 3.0 * tf.add_n(losses)
        return NestedMap(y=y, extras=extras, grads=tape.gradient(loss, trained))

    return run


def _by_micro_batch(layer, num):
    """The layer's values and gradients, one micro-batch after another."""

    def run(theta, args):
        seed = randomness.make_seed(7, 8)
        trained = [
            w for w, s in zip(theta.Flatten(), layer.VariableSpecs().Flatten()) if s.trainable
        ]
        with tf.GradientTape() as tape:
            tape.watch(trained)
            before = layer.before.FProp(theta.before, args[0])
            loss, found = 0.0, []
            for m in range(num):
                x, losses, updates = before[m::num], [], NestedMap()
                for name in ("c0", "c1"):
                    folded = randomness.fold_in(randomness.fold_in(seed, m), name)
                    (x,), extras = layer.children[name].FPropWithExtras(theta[name], (x,), folded)
                    losses.append(extras.loss)
                    updates[name] = extras.updates.Flatten()[0]
                y = layer.after.FProp(theta.after, x)
                loss += tf.reduce_sum(tf.square(y)) + 3.0 / num * tf.add_n(losses)
                found.append(NestedMap(y=y, losses=tf.stack(losses), updates=updates))
        return NestedMap(found=found, grads=tape.gradient(loss, trained))

    return run


def test_extras_are_means_and_seeds_are_those_of_micro_batch_and_layer():
    num, mesh, two = 4, "stage:2", {"cell_tpl": cells(WithExtras, (5, 4, 2))}
    seq = make(SeqLayer, **two)
    theta = run_single(seq.InitTheta, [SEED])
    want = run_single(_by_micro_batch(seq, num), [theta, [X]], jit_compile=False)
    layer = _pipelined(num, mesh, **two)
    found, _ = _run(layer, _moved(seq, layer, theta), [X], mesh, _with_extras)
    for m, part in enumerate(want.found):
        np.testing.assert_allclose(found.y[m::num], part.y, rtol=1e-5, atol=1e-6)
    losses = np.mean([part.losses for part in want.found], 0)
    got = [found.extras[f"c{i}"].loss for i in range(2)]
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    spec = layer.VariableSpecs().cells.float32_state
    updates = by_path(NestedMap(a=spec), NestedMap(a=found.extras.updates.GetItem(spec.path)))
    for name in ("c0", "c1"):
        mean = np.mean([part.updates[name] for part in want.found], 0)
        np.testing.assert_allclose(updates[f"seq.{name}.average"], mean, rtol=1e-5)
    specs = [
        NestedMap(x=[s for s in of.VariableSpecs().Flatten() if s.trainable]) for of in (seq, layer)
    ]
    grads = by_path(specs[1], NestedMap(x=found.grads))
    assert_same(grads, by_path(specs[0], NestedMap(x=want.grads)), 2e-5)
