"""The peak arithmetic of a job's devices, against which training measures its utilisation."""

from lingvo_moe.core.command import say
from lingvo_moe.core.engine import devices
from lingvo_moe.core.engine.measuring import matmul_flops_per_second
from lingvo_moe.core.planner.peaks import peak_flops


def job_peak(engine: str, num_devices: int) -> float | None:
    """Floating-point operations that the devices of a job do in a second at most; None where that is not known.

    A CPU has no data sheet here: its peak is that of a matrix product which is measured, about 0.2 s long. However many
    virtual devices the CPU shows, they share it.

    Args:
        engine: its name.
        num_devices: of all processes.
    """
    if devices.runs_on_cpu(engine):
        return matmul_flops_per_second() * devices.process_count()
    kind = devices.device_kind(engine)
    peak = peak_flops(kind)
    if peak is None:
        say(f"no data sheet is known for the device {kind!r}: utilisation is not measured")
        return None
    return peak * num_devices
