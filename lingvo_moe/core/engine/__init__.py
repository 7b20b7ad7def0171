"""Engines: lower an annotated TensorFlow function to a program, compile it for devices, run it, keep its state.

Besides this package only `core/job`, `core/private` and the fused kernels import JAX. It is here as the door to PJRT
and XLA's SPMD partitioner; no model code is written in it. `program`, `pjrt`, `collectives`, `devices` and
`checkpoints` do not import TensorFlow: a saved program runs without it.
"""

from lingvo_moe.core.engine import cuda_plugin

cuda_plugin.hide()  # before anything asks JAX for devices
