"""Peak arithmetic of devices by name, from public data sheets: what utilisation is measured against.

TPUs are those of topology.py; GPUs are those of gpu_cluster.py and some more, from NVIDIA's data sheets: dense
bfloat16 products (float16 on those without bfloat16), without sparsity.
"""

import re

from lingvo_moe.core.planner.machines.gpu_cluster import CARDS
from lingvo_moe.core.planner.machines.topology import CHIPS

# By words of the name that JAX or TensorFlow gives a device, the more special ones first.
_TPUS = (
    ("7x", "tpu7x"),
    ("tpu7x", "tpu7x"),
    ("v6", "v6e"),
    ("v6e", "v6e"),
    ("v5 lite", "v5e"),
    ("v5e", "v5e"),
    ("v5p", "v5p"),
    ("v5", "v5p"),
    ("v4", "v4"),
    ("v3", "v3"),
)
_GPUS = (
    ("GB200", CARDS["gb200"].peak_flops["bfloat16"]),
    ("B200", CARDS["b200"].peak_flops["bfloat16"]),
    ("H200 NVL", 835.5e12),
    ("H200", CARDS["h200"].peak_flops["bfloat16"]),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H100", CARDS["h100"].peak_flops["bfloat16"]),
    ("H800", CARDS["h800"].peak_flops["bfloat16"]),
    ("A100", CARDS["a100"].peak_flops["bfloat16"]),
    ("L40S", CARDS["l40s"].peak_flops["bfloat16"]),
    ("L4", CARDS["l4"].peak_flops["bfloat16"]),
    ("A10", 125e12),
    ("V100 PCIe", 112e12),
    ("V100", 125e12),
    ("T4", 65e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Floating-point operations that one device does in a second at most; None for a device without a data sheet here.

    Args:
        device_kind: as JAX or TensorFlow names it, e.g. 'TPU v4', 'NVIDIA H200'.
    """
    words = _words(device_kind)
    if "tpu" in words:
        generation = next((chip for name, chip in _TPUS if _words(name) <= words), None)
        return CHIPS[generation].peak_flops if generation else None
    return next((peak for name, peak in _GPUS if _words(name) <= words), None)


def _words(name: str) -> set[str]:
    """The words of a device's name. Names of other devices may begin as a word does: the L40 is no L4."""
    return set(re.findall("[a-z0-9]+", name.lower()))
