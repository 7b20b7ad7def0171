"""Convolutions with a dilated base over sharded dimensions, compared with gathers and an einsum on one device.

Figure 13's three cases, transposed convolutions, and random settings of everything at once.
"""

import pytest
from cases_base_dilation import CASES, FIGURE_13
from spmd_case import check

pytestmark = pytest.mark.slow  # in all


@pytest.mark.parametrize("case", CASES, ids=str)
def test_base_dilation(case):
    check(case, CASES)


def test_the_figures_cases_are_all_there():
    assert {case.name[: len("figure_13_case_1")] for case in FIGURE_13} == {
        f"figure_13_case_{number}" for number in (1, 2, 3)
    }
