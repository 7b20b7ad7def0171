"""The memory of a job's devices: what a run has used, and whether one can fit, from a lower bound of what it needs."""

import resource
from dataclasses import dataclass

from lingvo_moe.analysis.plans.memory.state import held, least_activations
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console import units
from lingvo_moe.core.console.command import UsageError
from lingvo_moe.core.engine.base import Compiled
from lingvo_moe.core.engine.device_memory import machine_bytes
from lingvo_moe.core.engine.engines import engine_class
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.pipeline.params import micro_batches_of
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import SLOTS, WEIGHTS
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.inspect import bytes_per_device
from lingvo_moe.core.task.meshes import size_params


def peak_line(engine: str, mesh: Mesh, step: Compiled, task: BaseTask) -> str:
    """The most memory that this process has used, beside what its training step and its state were said to need."""
    peak, whose = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "this process"
    kind = engine_class(engine)
    if not kind.RunsOnCpu() and (used := kind.PeakBytes()):
        peak, whose = used, "a device"
    where = f"each of {mesh.size} devices" if mesh.size > 1 else "the device"
    said = f"the state takes {units.size(held(task, mesh).total, 1)} on {where}"
    if bytes_of := step.Memory():
        need = bytes_of["arguments"] + bytes_of["outputs"] - bytes_of["aliased"]
        need += bytes_of["temporaries"]
        said += f", the step {units.size(need, 1)} as compiled"
    return f"memory: at most {units.size(peak, 1)} of {whose}; {said}"


@dataclass(frozen=True)
class Share:
    """The share of a job that this machine has."""

    processes: int = 1  # of the job; each has an equal share of the devices
    # Whether the devices are this machine's CPU; otherwise it has only the batch.
    holds_state: bool = True


def check_memory(
    params: Params,
    task: BaseTask,
    inputs: BaseInput,
    mesh: Mesh,
    share: Share = Share(),
    available: int | None = None,
) -> None:
    """Raises UsageError if a run cannot fit into this machine's memory. The message names parameters to reduce.

    The estimate is a lower bound: it counts weights, optimizer state, one batch and its smallest activations, but no
    gradients, temporaries or programs.

    Args:
        available: memory in bytes; None: `machine_bytes()`.
    """
    if available is None:
        available = machine_bytes()
    specs = inputs.BatchSpec()
    batch = sum(TensorSpec.Of(spec, "").NumBytes() for spec in specs.Flatten())
    state, num_devices = 0, max(1, mesh.size // share.processes)
    if share.holds_state:
        there = held(task, mesh)  # of a CPU's devices, the host's memory is their own
        state = num_devices * (there.kept + there.hosted[WEIGHTS] + there.hosted[SLOTS])
        parts = share.processes * micro_batches_of(params)[1]
        batch += least_activations(task, specs) // parts
    if state + batch <= available:
        return
    if state > batch:
        largest = max(task.VariableSpecs().Flatten(), key=lambda s: bytes_per_device(s, mesh))
        size = units.size(num_devices * bytes_per_device(largest, mesh), 1)
        what = f"{size} of it for {largest.path}, {'x'.join(map(str, largest.shape))}"
        paths = _sizes_of(params, task, largest)[:2]
    else:
        what = f"{units.size(batch, 1)} of it for one batch and its activations"
        paths = [f"input.{name}" for name in inputs.BATCH_SIZES]
    settings = ", ".join(f"{path}={params.Get(path)}" for path in paths)
    raise UsageError(
        f"the run needs at least {units.size(state + batch, 1)} of memory, and this machine has "
        f"{units.size(available, 1)}; {what}; reduce {settings or 'the model'}"
    )


def _sizes_of(params: Params, task: BaseTask, spec: VariableSpec) -> list[str]:
    """Returns the paths of the parameters that set a variable's dimensions, the largest dimension first."""
    sized_by: list[str] = []
    for size, letter in sorted(zip(spec.shape, spec.letters, strict=True), reverse=True):
        paths = size_params(task, spec.path, letter)
        if letter != "L":  # a stack's L counts blocks, the parameter counts layers
            paths = tuple(path for path in paths if params.Get(path) == size)
        sized_by += paths[:1]
    return sized_by
