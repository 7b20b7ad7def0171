"""Section 3.3.1: the communication primitives, counted in the compiled program."""

import pytest
from cases_communication import CASES
from spmd_case import check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_communication(case):
    check(case)
