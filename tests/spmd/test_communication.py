"""Section 3.3.1: the communication primitives, counted in the compiled program."""

import pytest
from cases_communication import CASES
from spmd_case import check, floats

from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.sharding import Mesh, replicate, split


@pytest.mark.parametrize("case", CASES, ids=str)
def test_communication(case):
    check(case, CASES)


def test_gather_that_nothing_needs():
    """An annotation directly after another at the very end of a program whose result shardings the partitioner chooses
    has no effect, since nothing uses the tensor. Set the results' shardings."""
    x = floats(16, 8)
    _, found = run_sharded(lambda a: replicate(split(2 * a + 1, 0, 8)), [x], Mesh.parse("d:8"))
    assert dict(found) == {}
