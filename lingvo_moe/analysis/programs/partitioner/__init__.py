"""Explains how XLA's partitioner sharded a program: why each collective is there, and known faults.

Nothing here needs TensorFlow or JAX.
"""
