"""Pooling over sharded dimensions: one device's values and gradients, and halos by permutation."""

import dataclasses

import pytest
from cases_pooling import CASES, WRONG
from spmd_case import check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pooling(case):
    check(case, CASES)


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_max_pooling_that_overlaps_by_its_stride_forward(case):
    check(dataclasses.replace(case, gradients=()))


@pytest.mark.parametrize("case", WRONG, ids=str)
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="XLA's partitioner: gradient of max pooling with window >= 2 * stride, cut",
)
def test_max_pooling_that_overlaps_by_its_stride_backward(case):
    check(case)
