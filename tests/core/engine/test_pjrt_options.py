"""XLA's options for programs on CPUs."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.sharding import Mesh

_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
_SPECS = [TensorSpec((32, 64), "float32"), TensorSpec((64, 128), "float32")]


@pytest.fixture(scope="module")
def product():
    engine = PjrtEngine(Mesh.parse("expert:1"))
    return engine, lower(tf.matmul, _SPECS, engine.mesh)


def test_products_are_not_ynnpacks(product):
    engine, program = product
    compiled = engine.Compile(program)
    assert "ynn_fusion" not in compiled.HloText()
    x, w = (np.full(spec.shape, 0.5, np.float32) for spec in _SPECS)
    np.testing.assert_array_equal(engine.Get(compiled(x, w)), np.full((32, 128), 16, np.float32))


def test_an_option_that_is_given_goes_before(product):
    engine, program = product
    theirs = {_YNNPACK: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    assert "ynn_fusion" in engine.Compile(program, theirs).HloText()
