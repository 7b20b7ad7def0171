"""FeatureExtractionLayer: layers in sequence."""

import numpy as np
import tensorflow as tf
from pipeline_toys import WithExtras, cells

from lingvo_moe.core.pipeline.cells import FeatureExtractionLayer
from lingvo_moe.core.randomness import make_seed

SEED = make_seed(1, 2)


def _layer(**params):
    p = FeatureExtractionLayer.Params().Set(name="d0", sub=cells())
    return p.Set(**params).Instantiate()


def test_layers_follow_each_other_and_one_output_is_a_tensor():
    layer = _layer()
    theta = layer.InitTheta(SEED)
    assert sorted(theta) == ["c0", "c1", "c2", "c3"]
    x = want = tf.ones([3, 5])
    for name in theta:
        want = layer.children[name].FProp(theta[name], want)
    np.testing.assert_array_equal(layer.FProp(theta, x), want)
    meta = FeatureExtractionLayer.FPropMeta(layer.p, (3, 5))
    assert meta.out_shapes == ((3, 2),)
    assert meta.flops == 2 * 3 * (35 + 21 + 18 + 12)


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
