"""Convolutions over sharded dimensions: one device's values and gradients, and halos by permutation."""

import dataclasses
import signal

import pytest
from cases_halo import ABORTED, CASES, NOT_COMPILED, WRONG_KERNEL_GRADIENT
from processes import run_python
from spmd_case import check

pytestmark = pytest.mark.slow  # in all


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution(case):
    check(case, CASES)


@pytest.mark.parametrize("case", WRONG_KERNEL_GRADIENT, ids=str)
def test_forward_and_input_gradient_beside_a_wrong_kernel_gradient(case):
    check(dataclasses.replace(case, gradients=(0,)))


@pytest.mark.parametrize("case", WRONG_KERNEL_GRADIENT, ids=str)
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="XLA's partitioner: see cases_halo")
def test_wrong_kernel_gradient(case):
    check(dataclasses.replace(case, gradients=(1,)))


def test_gradient_that_does_not_compile():
    check(dataclasses.replace(NOT_COMPILED, gradients=(1,)))
    with pytest.raises(Exception, match=r"hlo verifier.*Slice dim size"):
        check(dataclasses.replace(NOT_COMPILED, gradients=(0,)))


def test_negative_low_padding_ends_the_process():
    """Documents that this is XLA's fault, and fails when XLA fixes it."""
    program = (
        "from lingvo_moe.core.console.tensorflow_import import import_tensorflow; import_tensorflow(); "
        "import cases_halo, spmd_case; spmd_case.check(cases_halo.ABORTED)"
    )
    check(dataclasses.replace(ABORTED, gradients=(1,)))
    done = run_python("-c", program, timeout=120)
    assert done.returncode == -signal.SIGABRT
    assert "swd->padding_low()" in done.stderr
