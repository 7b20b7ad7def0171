"""Section 3.3.3: data formatting operators, and what crosses from device to device for them."""

import cases_data_formatting
import cases_joining
import pytest
from spmd_case import check

pytestmark = pytest.mark.slow  # in all


@pytest.mark.parametrize("case", cases_data_formatting.CASES, ids=str)
def test_data_formatting(case):
    check(case, cases_data_formatting.CASES)


@pytest.mark.parametrize("case", cases_joining.CASES, ids=str)
def test_joining(case):
    check(case, cases_joining.CASES)
