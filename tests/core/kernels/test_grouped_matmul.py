"""Ragged products compared with one product a row, in each form: tiles for XLA, a product for each group otherwise, and
a TPU's kernel, interpreted.

Letters: N rows, E expert, M and H the dimensions of a product.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import grouped_matmul as gm, xla
from lingvo_moe.core.kernels.pallas import calls, tpu

M, H = 3, 5


def _case(sizes: list[int], rows: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(rows, M), (len(sizes), M, H), (rows, H)]
    x, w, dy = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return [x, w, np.array(sizes, np.int32), dy]


def _by_row(x, w, sizes, dy) -> tuple:
    """Values and gradients, computed row by row."""
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    for n, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        y[n], dx[n] = x[n] @ w[e], w[e] @ dy[n]
        dw[e] += np.outer(x[n], dy[n])
    return y, dx, dw


def _product(x, w, sizes, dy) -> tuple:
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = kernels.current().grouped_matmul(x, w, sizes, None)
    return (y, *tape.gradient(y, [x, w], dy))


@pytest.fixture(params=["tiles", "groups", "kernel"])
def run(request, monkeypatch):
    """`_product` as a program of each form."""
    monkeypatch.setattr(calls, "INTERPRETED", True)
    with kernels.using(tpu if request.param == "kernel" else xla):
        yield tf.function(_product, jit_compile=request.param == "tiles", autograph=False)


def test_any_sizes(run):
    """One program computes all sizes: its shapes are static, group sizes are data."""
    for sizes in (
        [9, 0, 17, 3, 1],  # some rows belong to no expert
        [8, 8, 8, 8, 8],
        [40, 0, 0, 0, 0],
        [0, 0, 0, 0, 40],
        [0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1],
    ):
        case = _case(sizes, 40)
        for got, want in zip(run(*map(tf.constant, case)), _by_row(*case), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5, err_msg=str(sizes))


def test_rows_without_an_expert_have_no_effect(run):
    """Rows after the last group change nothing, whatever values they hold, and have no gradient."""
    x, w, sizes, dy = _case([3, 0, 2], 8)
    x[5:], dy[5:] = np.nan, np.nan
    for got in run(*map(tf.constant, [x, w, sizes, dy])):
        assert np.all(np.isfinite(got))


def test_bfloat16_sums_weights_gradients_in_float32(run):
    """512 equal rows: a sum in bfloat16 would stop at 256."""
    ones = tf.ones([512, 1], tf.bfloat16)
    args = [ones, tf.ones([1, 1, 1], tf.bfloat16), tf.constant([512]), ones]
    # Tiles of a power of two: more rows than one.
    y, dx, dw = run(*args)
    assert y.dtype == dx.dtype == dw.dtype == tf.bfloat16
    assert float(dw[0, 0, 0]) == 512


def test_the_loop_is_as_long_as_the_groups():
    """The loop multiplies no tile for an expert without rows, nor for rows without an expert."""
    for sizes, tiles in (([9, 0, 17, 3, 1], 2 + 3 + 1 + 1), ([0, 0, 0, 0, 0], 0)):
        form = gm._Tiles(tf.constant(sizes), 40, None)
        assert form._tile == 8 and int(form._last_E[-1]) == tiles
