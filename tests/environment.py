"""The environment of tests: eight virtual CPU devices, a quiet TensorFlow, no accelerator.

TensorFlow and JAX read these variables when they are first imported, so they are set before any test module is. A value
that is already set wins, except that an accelerator is never used: tests must say the same thing on every machine. With
TEST_GPU=1 (make test GPU=1) JAX sees NVIDIA GPUs beside the CPU, which stays the default; the tests that are for GPUs
then run too.
"""

import os

# Tests run each compiled program a few times, so short compile times matter more than speed: machine code is not
# optimized, fusions are compiled the quicker way, which saves a third of a model's compile, and machine code is made in
# one piece instead of 32, which saves a third of a small program's test. Partitioning is the same.
_XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_use_fusion_emitters": "false",
    "--xla_cpu_parallel_codegen_split_count": "1",
}


def set_up() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if os.environ.get("TEST_GPU", "0") == "1":
        os.environ["JAX_PLATFORMS"] = "cpu,cuda"
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    flags = os.environ.get("XLA_FLAGS", "")
    for flag, value in _XLA_FLAGS.items():
        if flag not in flags:
            flags = f"{flags} {flag}={value}".strip()
    os.environ["XLA_FLAGS"] = flags
