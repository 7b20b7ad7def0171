"""BaseLayer: specs, paths, inheritance and initial values."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from refusals import refusals

from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap


class Leaf(BaseLayer):
    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("size", 4, "Width.")
        return p

    def __init__(self, params):
        super().__init__(params)
        n = self.p.size
        self.CreateVariable("wi", WeightParams((2, n, n), "EMH", WeightInit.FanIn(n)))
        self.CreateVariable("b", WeightParams((n,), "H", WeightInit.Constant(3.0)))

    def FProp(self, theta, x, seed=None):
        return self.Cast(theta.b) + x


class Tree(BaseLayer):
    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("one", Leaf.Params())
        self.CreateChildren("many", [Leaf.Params().Set(size=2), Leaf.Params().Set(dtype="float64")])


def _tree(**kwargs):
    return Tree.Params().Set(name="tree", **kwargs).Instantiate()


def test_specs_mirror_children_and_carry_shardings():
    tree = _tree(weight_split={"E": "expert", "b.H": "model"})
    specs = tree.VariableSpecs()
    assert specs.one.wi.path == "tree.one.wi" and specs.many[0].b.path == "tree.many_0.b"
    assert specs.one.wi.split == ("expert", None, None)
    assert specs.one.b.split == ("model",)
    assert specs.many[0].wi.shape == (2, 2, 2)
    assert [specs.one.wi.dtype, specs.many[1].wi.dtype] == ["float32", "float64"]
    stacked = specs.one.wi.Stacked(5)
    assert (stacked.shape, stacked.letters) == ((5, 2, 4, 4), "LEMH")
    assert stacked.split == (None, "expert", None, None) and stacked.stack_dims == 1


def test_children_inherit_what_they_leave_open():
    tree = _tree(fprop_dtype="bfloat16")
    assert tree.one.fprop_dtype == tf.bfloat16 and tree.one.p.dtype == "float32"
    y = tree.one.FProp(NestedMap(b=tf.ones([4])), tf.zeros([4], tf.bfloat16))
    assert y.dtype == tf.bfloat16


def test_a_class_that_computes_otherwise_says_that_its_weights_are_not_packed():
    class Packs(Leaf):
        PackWeights = BaseLayer.PackChildren

    class Same(Packs):
        pass

    class Other(Packs):
        def FProp(self, theta, x):
            return super().FProp(theta, 2 * x)

    class Stated(Other):
        PackWeights = BaseLayer.PackWeights

    class Plain(Leaf):
        def FProp(self, theta, x):
            return x

    packs = [cls.PackWeights is BaseLayer.PackChildren for cls in (Packs, Same, Other)]
    assert packs == [True, True, False]
    theta = NestedMap()
    with pytest.warns(UserWarning, match="Other overrides .* state PackWeights in the class"):
        assert Other.Params().Instantiate().PackWeights(theta, None) is theta
    with warnings.catch_warnings(action="error"):
        for cls in (Stated, Plain):
            assert cls.Params().Instantiate().PackWeights(theta, None) is theta


def test_initial_values_depend_on_seed_and_path_alone():
    tree = _tree()
    seed = randomness.make_seed(1, 0)
    theta, again = tree.InitTheta(seed), tree.InitTheta(seed)
    for a, b in theta.Zip(again):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(theta.one.wi, theta.many[1].wi.numpy().astype("f"))
    assert not np.array_equal(theta.one.wi, tree.InitTheta(randomness.make_seed(2, 0)).one.wi)
    np.testing.assert_array_equal(theta.one.b, np.full([4], 3.0))
    # A function traces one drawing for all variables of a shape.
    for a, b in zip(theta.Flatten(), tf.function(tree.InitTheta)(seed).Flatten(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_constant_of_a_stack_draws_nothing():
    """Most values of a state are slots that begin at zero; each traced draw takes a hundred operations."""
    spec = _tree().VariableSpecs().one.b.Stacked(3)
    init = tf.function(spec.Init, autograph=False)
    graph = init.get_concrete_function(tf.TensorSpec([2], tf.int32)).graph
    assert len(graph.get_operations()) < 15
    np.testing.assert_array_equal(init(randomness.make_seed(1, 0)), np.full([3, 4], 3.0))


class Twice(BaseLayer):
    def __init__(self, params):
        super().__init__(params)
        self.CreateVariable("w", WeightParams((2,), "M", WeightInit.Constant()))
        self.CreateChild("w", Leaf.Params())


test_misuse_is_named = refusals(ValueError,
    (lambda: Twice.Params().Instantiate(), "'w' is taken"),
    (lambda: _tree().CreateVariable("v", WeightParams((2,), "EM", WeightInit.Constant())), "letters 'EM' for shape"),
    (lambda: _tree().two, AttributeError, "no attribute or child 'two'"),
    (lambda: _tree(fprop_dtype="bf16"), r"fprop_dtype='bf16'.*bfloat16"),
    (lambda: WeightInit("xavier", 1.0), "method=xavier: must be one of constant, uniform"),
)  # fmt: skip


@pytest.mark.parametrize("init, mean, std", [
    (WeightInit.Uniform(0.5), 0, 0.5 / 3**0.5),
    (WeightInit.Gaussian(2.0), 0, 2.0),
    (WeightInit.TruncatedGaussian(1.0), 0, 0.8796),
    (WeightInit.Constant(1.5), 1.5, 0),
])  # fmt: skip
def test_initializers(init, mean, std):
    x = init(randomness.make_seed(0, 3), [100, 100], tf.float32).numpy()
    np.testing.assert_allclose([x.mean(), x.std()], [mean, std], atol=0.05)
