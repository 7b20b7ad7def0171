"""Repeat on a toy body: scanned = unrolled, what gradients reach, what tracing and compiling cost."""

import resource

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, compare, with_gradients
from layer_testing import init, normal, single, wave

from lingvo_moe.core import kernels, randomness
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.layers.repeat import Repeat
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh

SPLITS = {"activation_split": {"B": "expert"}, "weight_split": {"E": "expert"}}


class Body(BaseLayer):
    """x + tanh(mean over experts of x w_e + memory), with dropout; one weight is only updated."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("dim", 4, "M.")
        p.Define("experts", 8, "E.")
        p.Define("rate", 0.0, "Dropout.")
        p.Define("fault", "", "What to return wrongly.")
        return p

    def __init__(self, params):
        super().__init__(params)
        m, e = self.p.dim, self.p.experts
        self.CreateVariable("w", WeightParams((e, m, m), "EMM", WeightInit.FanIn(m)))
        self.CreateVariable("idle", WeightParams((m,), "M", WeightInit.Constant(1.0)))

    def FProp(self, theta, x, shared, seed=None):
        h = tf.einsum("BTM,EMN->BTEN", x, self.Cast(theta.w))
        h = tf.reduce_sum(h, axis=2) * (1 / self.p.experts)
        h = tf.tanh(h + tf.cast(shared.memory, h.dtype)) * tf.cast(shared.factor, h.dtype)
        y = kernels.dropout(h, self.p.rate, seed)
        extras = NestedMap(aux=tf.reduce_sum(tf.cast(h * h, tf.float32)), updates=NestedMap())
        extras.updates.Set(f"{self.path}.idle", theta.idle + extras.aux)
        if seed is not None:
            extras.draw = randomness.uniform(seed, [1000])
        if self.p.fault == "carry":
            return tf.concat([x, y], -1), extras
        if self.p.fault == "extras":
            extras.count = tf.constant(1)
        return x + y, extras


def _layer(unroll=False, length=3, **kwargs):
    body = Body.Params().Set(**kwargs)
    p = Repeat.Params().Set(name="stack", body=body, num_repeats=length, unroll=unroll, **SPLITS)
    return p.Instantiate()


def _shared(batch=2):
    return NestedMap(memory=normal(5, batch, 3, 4), factor=tf.fill([batch, 1, 1], 2))


def _loss(layer):
    def fn(theta, x, shared, seed=None):
        y, extras = layer.FProp(theta, x, shared, seed=seed)
        return wave(y) + tf.reduce_sum(extras.aux * [1.0, 2.0, 3.0]), [y, extras]

    return fn


@pytest.mark.parametrize("seed, compiled", [(None, False), (7, True)])
def test_scanned_equals_unrolled(seed, compiled):
    """Values, extras, and gradients of weights, carry and shared tensors, aux loss included."""
    args = [init(_layer()), normal(0, 2, 3, 4), _shared()]
    if seed is not None:
        args.append(make_seed(seed, 1))

    def run(unroll):
        fn = with_gradients(_loss(_layer(unroll, rate=0.3)))
        if compiled:
            fn = tf.function(fn, jit_compile=True, autograph=False)
        return single(fn, *args)

    scanned, unrolled = run(False), run(True)
    # The weight that nothing uses: no gradient when unrolled, zeros when scanned.
    index = 0
    np.testing.assert_array_equal(scanned.grads[index], np.zeros([3, 4]))
    scanned.grads.pop(index), unrolled.grads.pop(index)
    assert len(scanned.grads) == 3
    assert_same(scanned, unrolled)
    assert scanned.rest[1].aux.shape == [3]


def test_each_repetition_starts_and_draws_by_itself():
    layer = _layer()
    theta = init(layer)
    one = Body.Params().Set(name="body").Instantiate()
    one.path = "stack.body"
    assert layer.VariableSpecs().body.w.shape == (3, *one.VariableSpecs().w.shape)
    assert np.unique(theta.body.w).size == theta.body.w.numpy().size
    _, extras = single(layer.FProp, theta, normal(0, 2, 3, 4), _shared(), seed=make_seed(0, 1))
    _, later = single(layer.FProp, theta, normal(0, 2, 3, 4), _shared(), seed=make_seed(0, 2))
    draws = np.concatenate([extras.draw, later.draw])
    assert np.abs(np.corrcoef(draws) - np.eye(6)).max() < 0.15
    np.testing.assert_array_equal(layer.SliceTheta(theta, 2).w, theta.body.w[2])


def test_wrong_bodies_are_refused():
    args = [init(_layer()), normal(0, 2, 3, 4), _shared()]
    with pytest.raises(ValueError, match=r"carry of float32 \(2, 3, 4\) into float32 \(2, 3, 8\)"):
        single(_layer(fault="carry").FProp, *args)
    with pytest.raises(TypeError, match="extras must be floating point, got int32"):
        single(_layer(fault="extras").FProp, *args)
    with pytest.raises(ValueError, match="num_repeats=0: must be an integer from 1 to 10000"):
        _layer(length=0)


def test_carry_of_unknown_batch_size_in_inference():
    layer = _layer()
    theta, x, shared = init(layer), normal(0, 2, 3, 4), _shared()

    @tf.function(input_signature=[tf.TensorSpec([None, 3, 4])], autograph=False)
    def run(x):
        return single(layer.FProp, theta, x, shared)[0]

    np.testing.assert_allclose(run(x), single(layer.FProp, theta, x, shared)[0], atol=1e-6)


def _train_program(length, batch, time, dim):
    """Lowers values and gradients for abstract arguments."""
    layer = _layer(length=length, dim=dim, rate=0.1)

    def fn(theta, x, memory, factor, seed):
        def loss(theta, x, memory):
            shared = NestedMap(memory=memory, factor=factor)
            y, extras = layer.FProp(theta, x, shared, seed=seed)
            # A runtime scale: the gradient of a bare sum would itself be a constant of y's size.
            scale = tf.cast(factor[0, 0, 0], tf.float32)
            return scale * (tf.reduce_sum(y * y) + tf.reduce_sum(extras.aux)), NestedMap()

        return with_gradients(loss)(theta, x, memory)

    rows = TensorSpec((batch, time, dim), "float32", ("expert", None, None))
    factor, seed = TensorSpec((batch, 1, 1), "int32"), TensorSpec((2,), "int32")
    specs = [layer.VariableSpecs(), rows, rows, factor, seed]
    return lower(fn, specs, Mesh.parse("expert:8"))


def test_programs_do_not_grow_with_depth_or_size():
    """The program has one copy of the body for any depth, and no constant of the size of an activation, here 8 GiB.

    Only the index of a row that dropout counts with may grow, 4 bytes for each of 2^15 rows.
    """
    small = len(_train_program(2, 8, 4, 4).exported)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large = len(_train_program(24, 2**15, 128, 512).exported)
    assert large < 1.1 * small + 4 * 2**15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**20  # KiB


def test_sharded_with_split_weights():
    """Batch and experts over eight devices give the same numbers, and stacked weights stay sharded."""
    layer = _layer(rate=0.3, length=3)
    args = [init(layer), normal(0, 8, 3, 4), _shared(8), make_seed(1, 1)]
    splits = [layer.VariableSpecs(), ("expert", None, None), None, None]
    _, collectives = compare(with_gradients(_loss(layer)), args, splits)
    assert "f32[3,1,4,4]" in collectives.hlo  # a device's part of the gradient's stack
    assert "f32[3,8,4,4]" not in collectives.hlo
