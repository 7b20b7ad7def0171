"""The settings for NVIDIA GPUs: XLA's options, and the memory that JAX takes. docs/gpus.md explains both.

Whatever the user has set already, in XLA_FLAGS or in JAX's own variables, wins.

Number formats need no setting. Float32 matrix products run in TF32, XLA's default, as TPUs round them to bfloat16;
`task.fprop_dtype="bfloat16"` computes in bfloat16 as everywhere. NVIDIA_TF32_OVERRIDE=0 gives full float32 products.
Collectives are asynchronous by default.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from lingvo_moe.core.gpu_memory import XLA_SHARE

PLATFORM = "gpu"  # as JAX names the devices of CUDA

# Moves other work between the start of a collective and its end. XLA's default schedule leaves few between them.
_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}
# JAX reads either when it first looks for GPUs, and refuses both together.
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def compiler_options(environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """XLA's options for programs on GPUs, without those that XLA_FLAGS sets."""
    names = set(re.findall(r"--(\w+)", environ.get("XLA_FLAGS", "")))
    return {name: value for name, value in _OPTIONS.items() if name not in names}


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables to add to an environment before JAX first looks for GPUs; {} where the user has set them."""
    if any(environ.get(name) for name in _MEMORY_VARIABLES):
        return {}
    return {_MEMORY_VARIABLES[0]: str(XLA_SHARE)}


def count_gpus(directory: Path = Path("/dev")) -> int:
    """The NVIDIA GPUs of this machine, by its device files."""
    return sum(1 for _ in directory.glob("nvidia[0-9]*"))


def unused_gpus(directory: Path = Path("/dev")) -> str:
    """A line for the user of a machine that has NVIDIA GPUs, where JAX found none; '' where it has none."""
    count = count_gpus(directory)
    if not count or os.environ.get("JAX_PLATFORMS"):
        return ""
    return (
        f"this machine has {count} NVIDIA GPU{'s' * (count > 1)}, but JAX found none and uses the CPU; "
        "make install GPU=1 installs what it needs (docs/gpus.md)"
    )


def prepare() -> None:
    """Sets the variables in this process. To be called before JAX first looks for devices; others ignore them."""
    os.environ.update(environment())
