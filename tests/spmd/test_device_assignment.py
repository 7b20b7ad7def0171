"""`shard` with any device assignment, and meshes that number their devices in any order."""

import numpy as np
import pytest
from cases_device_assignment import CASES, RINGS, ROW_MAJOR, held, hops, row_halos
from hypothesis import given, settings, strategies as st
from spmd_case import check, devices_of, floats

from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.sharding import Mesh

MESH = Mesh.parse("d:8")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_assignment(case):
    check(case, CASES)


@pytest.mark.parametrize(("assignment", "furthest"), [(ROW_MAJOR, 2), (RINGS, 1)])
def test_figure_10_neighbours_are_neighbours(assignment, furthest):
    args = [floats(2, 16, 3), floats(3, 3, 2)]
    _, found = run_sharded(row_halos(assignment), args, MESH, results=None)
    moved = devices_of(found.hlo, "collective-permute")
    assert max(hops(*pair) for pairs in moved for pair in pairs) == furthest


@settings(max_examples=6)
@given(devices=st.permutations(range(8)), shape=st.sampled_from([(8, 1), (4, 2), (2, 4), (1, 8)]))
def test_a_part_is_on_the_device_that_the_assignment_names(devices, shape):
    assignment = np.array(devices).reshape(shape)
    x = floats(8, 8)
    rows, found = run_sharded(held(assignment), [x], MESH)
    assert not found
    height, width = 8 // shape[0], 8 // shape[1]
    for (i, j), device in np.ndenumerate(assignment):
        part = x[i * height : (i + 1) * height, j * width : (j + 1) * width]
        np.testing.assert_array_equal(rows[device], part.reshape(-1))
