"""Convolutions with a dilated base over sharded dimensions, compared with gathers and an einsum on one device.

Figure 13's three cases, transposed convolutions, and random settings of everything at once.
"""

import pytest
from cases_base_dilation import CASES
from spmd_case import check

pytestmark = pytest.mark.slow  # in all


@pytest.mark.parametrize("case", CASES, ids=str)
def test_base_dilation(case):
    check(case, CASES)
