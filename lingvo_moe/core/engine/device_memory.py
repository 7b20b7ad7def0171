"""The memory of a job's devices, and of this machine."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from lingvo_moe.core.engine import devices
from lingvo_moe.core.engine.engines import engine_class
from lingvo_moe.core.sharding import Mesh

_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True)
class Memory:
    """The memory of a job's devices."""

    size: int | None  # total bytes; None where they are not known
    whose: str  # e.g. "this machine's"
    devices: int = 1  # how many devices share it


def memory_of(engine: str, mesh: Mesh, num_processes: int = 1) -> Memory:
    """The memory of the devices that an engine runs on: a CPU's devices share that of their machine, without swap.

    In a job of several processes each returns what the first one found, so that they agree. All have to call it.

    Args:
        num_processes: processes of the job; each has an equal share of the devices.
    """
    kind = engine_class(engine)
    on_cpu = kind.RunsOnCpu()
    size = machine_bytes() - psutil.swap_memory().total if on_cpu else kind.DeviceBytes()
    if num_processes > 1:
        size = int(devices.from_first_process(b"%d" % (size or 0))) or None
    if on_cpu:
        return Memory(size, "this machine's", max(1, mesh.size // num_processes))
    return Memory(size, "each device's")


def machine_bytes() -> int:
    """Memory in bytes that all processes of this machine (or container) can use, swap included."""
    total = psutil.virtual_memory().total
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text("ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total + psutil.swap_memory().total
