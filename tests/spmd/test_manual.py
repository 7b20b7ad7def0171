"""Manual regions compute, differentiate and communicate as the functions that they stand for."""

import pytest
from cases_manual import CASES
from spmd_case import check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    check(case)
