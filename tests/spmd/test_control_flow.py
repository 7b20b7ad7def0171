"""Loops, conditionals, dynamic slices and functions over sharded tensors are those of one device."""

import pytest
from cases_control_flow import CASES
from spmd_case import check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_control_flow(case):
    check(case, CASES)
