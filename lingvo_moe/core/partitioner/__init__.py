"""How XLA's partitioner sharded a program: which collective is there for what, and known faults.

Nothing here needs TensorFlow or JAX.
"""
