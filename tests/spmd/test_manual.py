"""Manual regions: values, gradients and collectives equal those of the functions that they replace."""

import pytest
from cases_manual import CASES
from spmd_case import check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    check(case, CASES)
