"""Peaks of devices, looked up by the names that JAX and TensorFlow use."""

import itertools
import os

import pytest

from lingvo_moe.analysis.plans.machines.peaks import peak_flops
from lingvo_moe.analysis.plans.machines.topology import CHIPS
from lingvo_moe.training.peak import matmul_flops_per_second


@pytest.mark.parametrize("kind, peak", [
    ("TPU v3", CHIPS["v3"].peak_flops),
    ("TPU v4", CHIPS["v4"].peak_flops),
    ("TPU v5 lite", CHIPS["v5e"].peak_flops),
    ("TPU v5p", CHIPS["v5p"].peak_flops),
    ("TPU v5", CHIPS["v5p"].peak_flops),
    ("TPU v6 lite", CHIPS["v6e"].peak_flops),
    ("TPU7x", CHIPS["tpu7x"].peak_flops),
    ("TPU v4 lite", None),
    ("TPU v9", None),
    ("NVIDIA H200", 989.4e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 80GB HBM3", 989.4e12),
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA L40S", 362.05e12),
    ("Tesla V100-SXM2-16GB", 125e12),
    ("Tesla V100-PCIE-32GB", 112e12),
    ("Tesla T4", 65e12),
    ("NVIDIA L4", 121e12),
    ("NVIDIA A10", 125e12),
    ("NVIDIA L40", None),
    ("NVIDIA RTX A1000", None),
    ("NVIDIA A10G", None),
    ("NVIDIA T400", None),
    ("NVIDIA H100 NVL", 835.5e12),
    ("GeForce 256", None),
])  # fmt: skip
def test_a_device_has_the_peak_of_its_data_sheet(kind, peak):
    assert peak_flops(kind) == peak


def test_other_programs_do_not_lower_a_cpus_peak(monkeypatch):
    """The peak follows from the CPU time of a product, not from the time that passes meanwhile."""
    cpu_time = itertools.count()
    monkeypatch.setattr("time.process_time", lambda: float(next(cpu_time)))
    products, seconds = 2, 3
    expected = products / seconds * 2 * 1024**3 * len(os.sched_getaffinity(0))
    assert matmul_flops_per_second(2.5) == pytest.approx(expected)
