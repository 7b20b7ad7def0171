"""How fast this machine multiplies matrices: the peak that a CPU's utilisation is measured against."""

import time

import numpy as np

_SIZE = 1024


def matmul_flops_per_second(seconds: float = 0.2) -> float:
    """Floating-point operations a second of the fastest of several float32 products, over about `seconds`."""
    a = np.random.default_rng(0).random((_SIZE, _SIZE), np.float32)
    out = a @ a  # warms up
    best = np.inf
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        np.matmul(a, a, out=out)
        best = min(best, time.perf_counter() - began)
    return 2 * _SIZE**3 / best
