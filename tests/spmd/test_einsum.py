"""Section 3.3.2: einsum in every sharding, with its collectives."""

import pytest
from cases_einsum import CASES
from spmd_case import check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_einsum(case):
    check(case, CASES)
