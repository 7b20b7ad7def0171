"""Peak arithmetic of devices by name, from public data sheets: what utilisation is measured against.

TPUs are those of topology.py; GPUs are those of gpu_cluster.py and some more, from NVIDIA's data sheets: dense
bfloat16 products (float16 on those without bfloat16), without sparsity.
"""

import re

from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS
from lingvo_moe.analysis.plans.machines.topology import CHIPS

# The generations of TPUs by the names that JAX gives their devices.
_TPUS = {
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
# GPUs by words of their names.
_GPUS = {
    **{name: card.peak_flops["bfloat16"] for name, card in CARDS.items()},
    "H200 NVL": 835.5e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "A10": 125e12,
    "V100 PCIe": 112e12,
    "V100": 125e12,
    "T4": 65e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Floating-point operations that one device does in a second at most; None for a device without a data sheet here.

    Args:
        device_kind: as JAX or TensorFlow names it, e.g. 'TPU v4', 'NVIDIA H200'.
    """
    if device_kind in _TPUS:
        return CHIPS[_TPUS[device_kind]].peak_flops
    words = _words(device_kind)
    # Of several names the most special one.
    fitting = (name for name in _GPUS if _words(name) <= words)
    card = max(fitting, key=lambda name: len(_words(name)), default=None)
    return None if card is None else _GPUS[card]


def _words(name: str) -> set[str]:
    """The words of a device's name. Names of other devices may begin as a word does: the L40 is no L4."""
    return set(re.findall("[a-z0-9]+", name.lower()))
