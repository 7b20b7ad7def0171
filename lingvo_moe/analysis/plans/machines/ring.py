"""Equal devices in a ring, in round figures: a machine that nobody has measured or named.

Its figures only order strategies. Machines with names are in topology.py and gpu_cluster.py.
"""

from dataclasses import dataclass, replace

from lingvo_moe.analysis.plans.machines.base_machine import Machine


@dataclass(frozen=True, kw_only=True)
class Ring(Machine):
    """Equal devices in a ring."""

    link_bandwidth: float  # bytes/s to the next device
    operation: float  # seconds that a collective takes beside its bytes
    hop: float  # seconds of each device on its way


def ring(name: str, flops: float, memory: float, link: float, operation: float, hop: float) -> Ring:
    """A ring of devices with so many FLOP/s in all number formats, and bytes/s of memory and links."""
    return Ring(
        name=name,
        peaks={"bfloat16": flops},
        hbm_bandwidth=memory,
        host_bandwidth=memory,  # the host's memory is the devices' own
        link_bandwidth=link,
        operation=operation,
        hop=hop,
    )


ACCELERATOR = ring("an accelerator of round figures", 1e14, 1e12, 1e11, 2e-6, 1e-6)
# Eight virtual devices share the cores, and exchange through the memory of the machine.
VIRTUAL_CPU = ring("virtual CPU devices of round figures", 1e10, 2e9, 5e8, 2e-5, 5e-6)


def here(num_devices: int, hbm_bytes: int) -> Ring:
    """The devices of this process, as virtual CPU devices; what counts is measured afterwards.

    Args:
        hbm_bytes: memory that a program may use on one of them.
    """
    name = f"the {num_devices} devices here"
    return replace(VIRTUAL_CPU, name=name, num_devices=num_devices, hbm_bytes=hbm_bytes)
