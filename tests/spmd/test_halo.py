"""Convolutions over cut dimensions: one device's values and gradients, and halos by permutation."""

import pytest
from cases_halo import CASES
from spmd_case import check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution(case):
    check(case)
