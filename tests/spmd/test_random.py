"""Random numbers are the same on any number of devices, for any sharding, and each device draws its own part."""

import functools

import numpy as np
import pytest
from cases_random import CASES, SEED, draws
from spmd_case import check

from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.annotate import mesh_split


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random(case):
    check(case, CASES)


@functools.cache
def _on_one_device(shape):
    return run_single(lambda seed: draws(seed, lambda x: x, shape), [SEED], jit_compile=False)


@pytest.mark.parametrize(("mesh", "mapping", "shape"), [
    ("d:4", (None, "d"), (16, 24)),
    ("d:8", (None, None), (16, 24)),
    ("d:8", ("d", None), (15, 24)),
    ("z:2,y:2,x:2", (("x", "z"), "y"), (16, 24)),
])  # fmt: skip
def test_numbers_do_not_depend_on_devices(mesh, mapping, shape):
    """Bits and uniform numbers are equal exactly; functions of them up to the compiler's rounding."""
    mesh = Mesh.parse(mesh)

    def fn(seed):
        return draws(seed, lambda x: mesh_split(x, mesh, mapping), shape)

    want = _on_one_device(shape)
    got, found = run_sharded(fn, [SEED], mesh, results=None)
    assert set(found) <= {"all-gather"}  # of the results
    for kind, g, w in zip(
        ("bits", "uniform", "normal", "truncated", "rows"), got, want, strict=True
    ):
        if kind in ("bits", "uniform", "rows"):
            np.testing.assert_array_equal(g, w, err_msg=kind)
        else:
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6, err_msg=kind)
