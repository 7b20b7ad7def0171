"""Section 3.3.2: einsum, however it is cut, and what that costs."""

import pytest
from cases_einsum import CASES
from spmd_case import check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_einsum(case):
    check(case)
