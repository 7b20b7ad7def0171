"""Peak FLOP/s of a job's devices, from which training computes its utilisation (MFU)."""

import os
import time

import tensorflow as tf

from lingvo_moe.analysis.plans.machines.peaks import peak_flops
from lingvo_moe.core.console.command import say
from lingvo_moe.core.engine import devices
from lingvo_moe.core.engine.engines import engine_class

_SIZE = 1024  # of matrices that are multiplied to measure a CPU


def job_peak(engine: str, num_devices: int, dtype: str) -> float | None:
    """Returns the peak FLOP/s of all devices of a job together; None if it is unknown.

    An accelerator's peak comes from its data sheet. A CPU's is measured with matrix products of `dtype`, that of the
    activations, for 0.2 CPU seconds; virtual devices of one CPU share its peak.
    """
    engine_kind = engine_class(engine)
    if engine_kind.RunsOnCpu():
        return matmul_flops_per_second(dtype=dtype) * devices.process_count()
    kind = engine_kind.DeviceKind()
    peak = peak_flops(kind)
    if peak is None:
        say(f"no data sheet is known for the device {kind!r}: utilisation is not measured")
        return None
    return peak * num_devices


def matmul_flops_per_second(cpu_seconds: float = 0.2, dtype: str = "float32") -> float:
    """Floating-point operations a second that all CPUs of this process together do in products of this type.

    Products are repeated until they have taken `cpu_seconds`. CPU time is counted, not the clock's, so that other
    programs on the machine do not lower the result. TensorFlow multiplies, with the threads that also train.
    """
    products = 0
    with tf.device("CPU:0"):
        a = tf.fill([_SIZE, _SIZE], tf.constant(0.5, dtype))
        (a @ a).numpy()  # warms up
        began = time.process_time()
        while (taken := time.process_time() - began) < cpu_seconds:
            (a @ a).numpy()
            products += 1
    cpus = len(os.sched_getaffinity(0))
    return 2 * _SIZE**3 * products / taken * cpus
