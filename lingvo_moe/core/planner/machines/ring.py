"""Equal devices in a ring, in round figures: a machine that nobody has measured or named.

Its figures only order strategies. Machines with names are in topology.py and gpu_cluster.py.
"""

from dataclasses import dataclass

# How often the bytes pass a link, and hops, for shares (n-1)/n of n devices. In an all-to-all half of the bytes go each
# way.
_PASSES = {
    "all-reduce": (2.0, 2),
    "all-gather": (1.0, 1),
    "reduce-scatter": (1.0, 1),
    "all-to-all": (0.5, 1),
}


@dataclass(frozen=True)
class Ring:
    """Equal devices in a ring.

    Attributes:
        name: for people.
        flops: FLOP/s of a device.
        memory_bandwidth, link_bandwidth: bytes/s of its memory, and to the next device.
        operation, hop: seconds that a collective takes beside its bytes, and those of each device on the way.
    """

    name: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    operation: float
    hop: float

    def Seconds(self, kind: str, num_bytes: float, count: int) -> float:
        """The seconds that a collective of `count` devices takes; `num_bytes` as in network.seconds."""
        if kind == "collective-permute":
            return self.operation + num_bytes / self.link_bandwidth + self.hop
        passes, rounds = _PASSES[kind]
        sent = passes * num_bytes * (count - 1) / count
        return self.operation + sent / self.link_bandwidth + rounds * (count - 1) * self.hop


ACCELERATOR = Ring("an accelerator of round figures", 1e14, 1e12, 1e11, 2e-6, 1e-6)
# Eight virtual devices share the cores, and exchange through the memory of the machine.
VIRTUAL_CPU = Ring("virtual CPU devices of round figures", 1e10, 2e9, 5e8, 2e-5, 5e-6)
