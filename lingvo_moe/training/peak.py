"""Peak FLOP/s of a job's devices, from which training computes its utilisation (MFU)."""

from lingvo_moe.core.console.command import say
from lingvo_moe.core.engine import devices
from lingvo_moe.core.engine.measuring import matmul_flops_per_second
from lingvo_moe.core.planner.machines.peaks import peak_flops


def job_peak(engine: str, num_devices: int) -> float | None:
    """Returns the peak FLOP/s of all devices of a job together; None if it is unknown.

    An accelerator's peak comes from its data sheet. A CPU's is measured with matrix products of 0.2 CPU seconds;
    virtual devices of one CPU share its peak.
    """
    if devices.runs_on_cpu(engine):
        return matmul_flops_per_second() * devices.process_count()
    kind = devices.device_kind(engine)
    peak = peak_flops(kind)
    if peak is None:
        say(f"no data sheet is known for the device {kind!r}: utilisation is not measured")
        return None
    return peak * num_devices
