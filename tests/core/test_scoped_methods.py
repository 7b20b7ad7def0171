"""Operations carry the path of their layer: every method of a layer that computes is scoped."""

import importlib
import inspect
import pkgutil

import pytest
import tensorflow as tf

from lingvo_moe.core import layers, moe
from lingvo_moe.core.base_layer import BaseLayer, scoped
from lingvo_moe.core.moe import routers
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.image import image_model
from lingvo_moe.tasks.mt import mt_model

for _room in (layers, moe, routers):
    for _module in pkgutil.iter_modules(_room.__path__, f"{_room.__name__}."):
        importlib.import_module(_module.name)


def _layers(of: type = BaseLayer) -> set[type]:
    """The layers of the library, including models."""
    found = {cls for cls in of.__subclasses__() if cls.__module__.startswith("lingvo_moe.")}
    return found.union(*(_layers(cls) for cls in of.__subclasses__()))


def test_the_layers_are_found():
    names = {cls.__name__ for cls in _layers()}
    models = {image_model.ImageClassifier.__name__, mt_model.MtModel.__name__}
    assert {"MultiHeadAttention", "MoELayer", "Top2Router", "MaskedDispatcher"} | models <= names


@pytest.mark.parametrize("cls", sorted(_layers(), key=lambda c: c.__qualname__))
def test_every_public_method_that_computes_is_scoped(cls):
    for name, method in vars(cls).items():
        if not inspect.isfunction(method) or name.startswith("_"):
            continue
        computes = {"theta", "routing"} & set(inspect.signature(method).parameters)
        assert not computes or hasattr(method, "scoped_in"), f"{cls.__name__}.{name} needs @scoped"


def test_what_overrides_a_scoped_method_is_scoped():
    class Parent(BaseLayer):
        def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
            return tf.identity(x)

        @scoped
        def Half(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
            return tf.negative(x)

        def Open(self, x: tf.Tensor) -> tf.Tensor:
            return tf.abs(x)

    class Child(Parent):
        def Half(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
            return tf.square(super().Half(theta, x))

    child = Child.Params().Set(name="child").Instantiate()
    with tf.Graph().as_default(), tf.name_scope("elsewhere"):
        x = tf.zeros([])
        names = [y.op.name for y in (child.FProp(None, x), child.Half(None, x), child.Open(x))]
    assert names == ["child/Identity", "child/Square", "elsewhere/Abs"]
