"""8-bit weights: the exact rounding of a product, on any processor; and how modules save them.

Letters: R row, M and N the dimensions of a weight.
"""

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal
from processes import run_python

from lingvo_moe.core import processor
from lingvo_moe.core.kernels.eight_bit import EightBit
from lingvo_moe.core.kernels.packed_weights import FloatBlocks, PackAs
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.decoding.saved_weights import SavedWeights

_EXTREMES = """
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
import_tensorflow()
import numpy as np
import tensorflow as tf
from lingvo_moe.core.kernels.eight_bit import EightBit

x_RM = np.where(np.arange(96) % 5 < 4, 1.0, -1.0) * np.array([[1.0], [-1.0], [3.0]])
product = tf.function(EightBit.Of(np.outer(np.where(np.arange(96) % 7 < 6, 1, -1), np.ones(80))).Product)
want = x_RM @ np.where(np.arange(96) % 7 < 6, 1, -1)
np.testing.assert_allclose(product(tf.constant(x_RM, tf.float32)), np.repeat(want[:, None], 80, 1), rtol=1e-6)
"""


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _product(weight: EightBit):
    spec = tf.TensorSpec([None, weight.int8_MN.shape[0]])
    return tf.function(weight.Product, input_signature=[spec], autograph=False)


def test_a_product_is_that_of_the_integers():
    x_RM, w_MN = _numbers(9, 300), _numbers(300, 70, seed=1) * np.linspace(0.1, 9, 70, dtype="f")
    weight = EightBit.Of(w_MN)
    assert np.abs(weight.int8_MN.numpy()).max(0).tolist() == [64] * 70
    most_R1 = np.abs(x_RM).max(1, keepdims=True)
    rounded_RM = np.floor(x_RM / (most_R1 / 127) + 0.5).astype(np.int64)
    want = (
        (rounded_RM @ weight.int8_MN.numpy().astype(np.int64))
        * (most_R1 / 127)
        * weight.scale_N.numpy()
    )
    got = _product(weight)(x_RM)
    assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    difference = np.linalg.norm(got - x_RM @ w_MN) / np.linalg.norm(x_RM @ w_MN)
    assert 0.001 < difference < 0.03


def test_a_row_is_bit_identical_alone_and_with_others():
    product, x_RM = _product(EightBit.Of(_numbers(64, 40))), _numbers(33, 64, seed=1)
    together = product(x_RM).numpy()
    for rows in (1, 2, 3, 16, 17):
        assert_array_equal(product(x_RM[:rows]), together[:rows])
        assert_array_equal(product(x_RM[-rows:]), together[-rows:])


def test_no_rows_and_rows_of_zeros_or_without_a_number():
    product, x_RM = _product(EightBit.Of(_numbers(16, 8) * (np.arange(8) > 0))), _numbers(3, 16)
    assert product(x_RM[:0]).shape == (0, 8)
    assert not product(x_RM)[:, 0].numpy().any()  # a column of zeros
    x_RM[0], x_RM[1, 4] = 0, np.nan
    assert np.isfinite(product(x_RM).numpy()).all(1).tolist() == [True, False, True]
    assert not product(x_RM)[0].numpy().any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_not_taken_for_one(bad):
    w_MN = _numbers(16, 8)
    w_MN[3, 2] = bad
    w_MN[:, 5] = 1e-42  # and one that is hardly more than none is none
    got = _product(EightBit.Of(w_MN))(_numbers(3, 16)).numpy()
    assert np.isnan(got).any(0).nonzero()[0].tolist() == [2]
    assert not got[:, 5].any()


def test_results_are_of_the_type_of_the_rows():
    weight, x_RM = EightBit.Of(_numbers(16, 8)), tf.cast(_numbers(3, 16), tf.bfloat16)
    got = tf.function(weight.Product)(x_RM)
    assert got.dtype == tf.bfloat16
    assert_array_equal(got, tf.cast(_product(weight)(tf.cast(x_RM, tf.float32)), tf.bfloat16))


def test_sums_do_not_overflow_on_processors_without_instructions_for_them():
    """oneDNN adds two products in 16 bits, which hold no larger sums, if instructions end with AVX2."""
    env = {"ONEDNN_MAX_CPU_ISA": "AVX2", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = run_python("-c", _EXTREMES, env=env)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("size", [8, 16, 24, 64])
@pytest.mark.parametrize("instructions", ["avx2", "avx2 avx512f"])
def test_both_kinds_of_packed_weights_are_used_alike(size, instructions, monkeypatch):
    """Both give about the same products, complete and by head; float weights give the plain product, in blocks for
    either processor."""
    monkeypatch.setattr(processor, "features", lambda: instructions)
    x_RM, w_MN = tf.constant(_numbers(5, 32)), tf.constant(_numbers(32, 100))
    w_MNK = tf.constant(_numbers(32, 3, size))
    plain, ints = (PackAs(kind).Matrix(w_MN) for kind in ("float32", "int8"))
    assert (type(plain), type(ints)) == (FloatBlocks, EightBit)
    assert_allclose(plain.Product(x_RM), x_RM @ w_MN, rtol=1e-5, atol=1e-5)
    assert_allclose(ints.Product(x_RM), x_RM @ w_MN, atol=0.3)
    plain, ints = (PackAs(kind).Heads(w_MNK).packed for kind in ("float32", "int8"))
    want = np.einsum("rm,mnk->nrk", x_RM, w_MNK)
    assert_allclose(plain.HeadsProduct(x_RM, 3), want, rtol=1e-5, atol=1e-5)
    assert_allclose(ints.HeadsProduct(x_RM, 3), want, atol=0.5)
    joined = np.transpose(want, [1, 0, 2]).reshape(5, 3 * size)
    assert_allclose(plain.Product(x_RM), joined, rtol=1e-5, atol=1e-5)
    assert_allclose(ints.Product(x_RM), joined, atol=0.5)


def _saved(path, seed: int):
    """Saves a module that multiplies in a loop, as a search does; returns its result and the directory."""
    module = SavedWeights(NestedMap(layers=[NestedMap(w=EightBit.Of(_numbers(4, 5, seed=seed)))]))

    def product(x_RM: tf.Tensor) -> tf.Tensor:
        def step(i: tf.Tensor, y_RN: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, y_RN + module.Theta().layers[0].w.Product(x_RM)

        return tf.while_loop(lambda i, y_RN: i < 2, step, [0, tf.zeros([3, 5])])[1]

    module.product = tf.function(product, input_signature=[tf.TensorSpec([3, 4])], autograph=False)
    want = module.product(_numbers(3, 4)).numpy()
    tf.saved_model.save(module, str(path))
    return module, want, str(path)


def test_a_module_holds_them_as_variables(tmp_path):
    module, want, _ = _saved(tmp_path, seed=1)
    assert [(v.name, v.dtype) for v in module.variables] == [
        ("layers_0_.w:0", kind) for kind in (tf.int8, tf.float32, tf.float32)
    ]
    weight = EightBit.Of(_numbers(4, 5, seed=1))
    assert_array_equal(want, 2 * weight.Product(tf.constant(_numbers(3, 4))))
    with pytest.raises(ValueError, match="cannot be assigned"):
        module.Assign(NestedMap(layers=[NestedMap(w=weight)]))


def test_models_in_one_process_have_weights_of_their_own(tmp_path):
    """Two models with equal names, shapes and operations do not share packed weights."""
    saved = [_saved(tmp_path / str(seed), seed)[1:] for seed in (1, 2)]
    assert np.abs(saved[0][0] - saved[1][0]).max() > 1
    loaded = [tf.saved_model.load(path) for _, path in saved]
    for _ in range(2):
        for model, (want, _) in zip(loaded, saved, strict=True):
            assert_array_equal(model.product(_numbers(3, 4)), want)
