"""Peak arithmetic of devices by name, from public data sheets: what utilisation is measured against.

TPUs are those of topology.py. GPUs: NVIDIA's data sheets, dense bfloat16 products (float16 on those without
bfloat16), without sparsity.
"""

from lingvo_moe.core.planner.topology import CHIPS

# By a part of the name that JAX or TensorFlow gives a device, the more special ones first.
_TPUS = (
    ("v6", "v6e"),
    ("v5 lite", "v5e"),
    ("v5e", "v5e"),
    ("v5", "v5p"),
    ("v4", "v4"),
    ("v3", "v3"),
)
_GPUS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("T4", 65e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Floating-point operations that one device does in a second at most; None for a device without a data sheet here.

    Args:
        device_kind: as JAX or TensorFlow names it, e.g. 'TPU v4', 'NVIDIA H200'.
    """
    kind = device_kind.lower()
    if "tpu" in kind:
        generation = next((chip for name, chip in _TPUS if name in kind), None)
        return CHIPS[generation].peak_flops if generation else None
    return next((peak for name, peak in _GPUS if name.lower() in kind), None)
