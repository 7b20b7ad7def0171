"""FeatureExtractionLayer: layers in sequence, with activations fetched and carried along."""

import numpy as np
import tensorflow as tf
from pipeline_toys import WithExtras, cells

from lingvo_moe.core.pipeline.cells import FeatureExtractionLayer
from lingvo_moe.core.randomness import make_seed

SEED = make_seed(1, 2)


def _layer(**params):
    p = FeatureExtractionLayer.Params().Set(name="d0", sub=cells())
    return p.Set(**params).Instantiate()


def test_fetched_activations_follow_those_that_came():
    layer = _layer(num_act_inputs=1, num_act_outputs=3, act_fetch_layers=["c2", "c0"])
    theta = layer.InitTheta(SEED)
    x = tf.ones([3, 5])
    y, carried, third, first = layer.FProp(theta, x, tf.constant(7.0))
    assert carried == 7
    want = layer.c0.FProp(theta.c0, x)
    np.testing.assert_array_equal(first, want)
    want = layer.c2.FProp(theta.c2, layer.c1.FProp(theta.c1, want))
    np.testing.assert_array_equal(third, want)
    np.testing.assert_array_equal(y, layer.c3.FProp(theta.c3, want))
    meta = FeatureExtractionLayer.FPropMeta(layer.p, (3, 5), ())
    assert meta.out_shapes == ((3, 2), (), (3, 6), (3, 7))
    assert meta.flops == 2 * 3 * (35 + 21 + 18 + 12)


def test_one_output_is_a_tensor_and_names_have_the_prefix():
    layer = _layer(variable_name_prefix="p_")
    theta = layer.InitTheta(SEED)
    assert sorted(theta) == ["p_c0", "p_c1", "p_c2", "p_c3"]
    assert layer.FProp(theta, tf.ones([3, 5])).shape == [3, 2]


def test_extras_are_joined_and_seeds_are_those_of_names():
    layer = _layer(sub=cells(WithExtras))
    theta = layer.InitTheta(SEED)
    (y,), extras = layer.FPropWithExtras(theta, (tf.ones([3, 5]),), SEED)
    names = [path for path, _ in extras.FlattenItems()]
    own = [f"c{i}.loss" for i in range(4)]
    assert names == own + [f"updates.d0.c{i}.average" for i in range(4)]
    (again,), _ = layer.FPropWithExtras(theta, (tf.ones([3, 5]),), SEED)
    np.testing.assert_array_equal(y, again)
    assert not np.allclose(y, layer.FProp(theta, tf.ones([3, 5])))
