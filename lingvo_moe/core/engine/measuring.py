"""Measures how fast this machine multiplies matrices: the peak that a CPU's utilisation is measured against."""

import os
import time

import tensorflow as tf

_SIZE = 1024


def matmul_flops_per_second(cpu_seconds: float = 0.2) -> float:
    """Floating-point operations a second that all CPUs of this process together do in float32 products.

    Products are repeated until they have taken `cpu_seconds`. CPU time is counted, not the clock's, so that other
    programs on the machine do not lower the result. TensorFlow multiplies, with the threads that also train.
    """
    products = 0
    with tf.device("CPU:0"):
        a = tf.fill([_SIZE, _SIZE], 0.5)
        (a @ a).numpy()  # warms up
        began = time.process_time()
        while (taken := time.process_time() - began) < cpu_seconds:
            (a @ a).numpy()
            products += 1
    cpus = len(os.sched_getaffinity(0))
    return 2 * _SIZE**3 * products / taken * cpus
