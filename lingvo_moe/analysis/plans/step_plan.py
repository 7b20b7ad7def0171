"""Makes a plan of an experiment and a topology: registry -> step -> program -> TPU or GPU compiler -> plan.

The sibling of trainer.py: the same step, lowered by the same path, is compiled for a machine that is
not there instead of being run on one that is.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.plans import mesh_order, pipeline, tables
from lingvo_moe.analysis.plans.machines.base_machine import Machine, PlanError
from lingvo_moe.analysis.plans.machines.gpu_cluster import Cluster
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.memory import breakdown, host_link, remedies, state
from lingvo_moe.analysis.plans.network import interconnect
from lingvo_moe.analysis.plans.recomputing import chosen_form
from lingvo_moe.analysis.plans.work.costs import costs as costs_of
from lingvo_moe.analysis.programs import checking
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.aot.aot_cache import cached
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.hlo.parts import Layers
from lingvo_moe.core.config import checks, registry
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console import units
from lingvo_moe.core.engine.device_memory import Memory
from lingvo_moe.core.engine.devices import has_fused_kernels
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.program_analysis import ERROR, OFF, check_action
from lingvo_moe.core.nested_map import flatten
from lingvo_moe.core.pipeline.params import settings_of
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.state.offload import EXPERTS, SLOTS, Offload, OffloadError, items_of
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.meshes import check_divisible, make_mesh
from lingvo_moe.core.task.step import Step

TRAIN, PREFILL, DECODE = "train", "prefill", "decode"
WHATS = (TRAIN, PREFILL, DECODE)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """A step to plan, and its machine."""

    model: str  # an experiment, e.g. 'mt.M4MoE2048E36L'
    topology: str  # e.g. 'v3:32x32', 'v5p:4x4x4*2' (two slices) or 'h100:32x8'
    override: str = ""  # the text of --model_params_override
    what: str = TRAIN  # one of WHATS
    mesh: str = ""  # 'axis:size,...'; '': the experiment's own, sized to the topology
    token_budget: float = 1e12  # target tokens that a whole training run sees
    # What to do with a step that XLA's partitioner is known to compute wrongly: one of `program_analysis.ACTIONS`.
    known_faults: str = ERROR
    prompt: int = 0  # tokens that decoding reads; 0: as many as the input says
    reply: int = 0  # new tokens of decoding; 0: as the task says


class Lowering:
    """The program that was lowered last: machines with as many devices, and as many fused kernels, take the same."""

    def __init__(self) -> None:
        self._last: dict[tuple[str | bool, ...], tuple[Program, float]] = {}

    def Of(
        self, key: tuple[str | bool, ...], lower: Callable[[], Program]
    ) -> tuple[Program, float]:
        """The program of a key and the seconds that it took to lower; `lower` is called for another key than before."""
        if key not in self._last:
            started = time.monotonic()
            program = lower()
            self._last = {key: (program, time.monotonic() - started)}
        return self._last[key]


def make_plan(
    request: Request,
    cache_dir: Path | None,
    say: Say = lambda _: None,
    lowering: Lowering | None = None,
) -> dict[str, Any]:
    """Makes a plan, as docs/plan_json.md describes it; `say` is called with lines about the progress.

    Args:
        cache_dir: where compiled programs are kept; None to keep none.
        lowering: what earlier plans were lowered with.

    Raises:
        ValueError: of some subclass, with one line that names the flag: an experiment, override,
            topology or mesh that cannot be; no compiler; a known fault of XLA's partitioner.
    """
    checks.check_one_of("--what", request.what, WHATS, PlanError)
    check_action(request.known_faults, "--known_faults")
    topology = parse_machine(request.topology)
    params = registry.GetParams(request.model, request.override)
    form = params.task
    task = form.Instantiate()
    devices = aot.devices_of(topology.name)
    mesh = planned_mesh(params, len(devices), request.mesh)
    check_divisible(params, task, mesh)
    task.CheckInput(params.task, params.input)
    train = request.what == TRAIN
    if train:
        form, line = chosen_form(params, mesh, topology_memory(topology))
        task = form.Instantiate()
        if line:
            say(line)
    step, job = describe_job(request, params, task)
    fused = has_fused_kernels(devices[0])
    sizes = f"{request.what} {request.prompt} {request.reply}"
    key = request.model, request.override, sizes, form.ToText(), str(mesh), fused

    def lower() -> Program:
        say(f"lowering the {job.what} step of {request.model} for mesh {mesh}")
        return lower_step(step, mesh, fused)

    program, lower_seconds = (lowering or Lowering()).Of(key, lower)
    out = _before_compiling(request, topology, task, job, program)
    out["compile"] = {"lower_seconds": lower_seconds, "program_bytes": len(program.exported)}
    compiled = _compiled(program, topology, cache_dir, say)
    layers = Layers(task.DeclaredParts())
    if isinstance(compiled, aot.OutOfMemory):
        memory = breakdown.misfit_plan(compiled, program.signature, layers)
        if train:
            memory["advice"] = [*remedies.advice(memory, form, params, mesh), *memory["advice"]]
        return out | {"memory": memory, "work": [], "collectives": [], "time": None}
    _check_compiled(compiled, program, request, task, topology)
    out["compile"] |= {
        "compile_seconds": compiled.compile_seconds,
        "host_peak_bytes": compiled.host_peak_bytes,
    }
    parts = task.PipelineParts()
    schedule = pipeline_schedule(params, program.mesh, parts.sizes if parts else ())
    out |= _analyse(compiled, program, topology, job, schedule, layers)
    tables.check(out)
    return out


def _before_compiling(
    request: Request, topology: Machine, task: BaseTask, job: tables.PlannedJob, program: Program
) -> dict[str, Any]:
    """The part of a plan that needs no compiler."""
    specs = task.StateSpecs() if request.what == TRAIN else task.VariableSpecs()
    return {
        "version": tables.VERSION,
        "model": request.model,
        "override": request.override,
        "what": request.what,
        "program_hash": program.hash,
        "mesh": str(program.mesh),
        "topology": topology.Describe() | {"model": interconnect.describe(topology)},
        "batch": job.batch,
        "model_flops": job.model_flops,
        "parameters": tables.parameters(specs, program.mesh),
        **_state(request, task, program.mesh),
        "compiler": aot.compiler_versions(topology.name) | {"jax": version("jax")},
    }


def _check_compiled(
    compiled: aot.AotResult, program: Program, request: Request, task: BaseTask, topology: Machine
) -> None:
    """Refuses an offload that frees nothing, and a known fault of the partitioner."""
    if request.what == TRAIN:
        check_offloaded(task.p.offload, compiled.memory, topology.name)
    if program.mesh.size > 1 and request.known_faults != OFF:
        faults = checking.find_faults(compiled.partitioner_input, program)
        checking.act_on(faults, program.name, request.known_faults)


def check_offloaded(offload: Offload, reported: Mapping[str, int], topology: str) -> None:
    """Raises PlanError if a train.offload frees nothing by the compiler's own figures, AotResult.memory."""
    there = sum(reported.get(f"host_{part}", 0) for part in ("arguments", "temporaries"))
    if items_of(offload) and not there:
        raise PlanError(
            f"train.offload={offload}: frees nothing on {topology}. The compiler leaves nothing in the hosts' memory, "
            f"and needs {units.size(reported['needed'])} on each device; set it to none"
        )


def _state(request: Request, task: BaseTask, mesh: Mesh) -> dict[str, Any]:
    """The part of a plan about the training state, of a training step."""
    if request.what != TRAIN:
        return {}
    return {"state": state.state_plan(task, mesh, dict(_offloaded(task)))}


def _offloaded(task: BaseTask) -> Iterator[tuple[str, BaseTask]]:
    """The task with slots, experts or both in the hosts' memory, where these would free memory."""
    for offload in (SLOTS, EXPERTS, [EXPERTS, SLOTS]):
        other = type(task)(task.p.Copy().Set(offload=offload))
        with contextlib.suppress(OffloadError):
            name = offload if isinstance(offload, str) else str(offload).replace("'", '"')
            other.StateSpecs()  # which checks it
            yield name, other


def _compiled(
    program: Program, topology: Machine, cache_dir: Path | None, say: Say
) -> aot.AotResult | aot.OutOfMemory:
    """The compiled program, from the cache where it is there, or why it does not fit."""
    say(f"compiling for {topology.name}: {topology.num_devices} devices")
    try:
        compiled = cached(
            program,
            topology.name,
            aot.compiler_identity(topology.name),
            cache_dir,
            lambda: aot.compile_for_topology(program, topology.name),
        )
    except aot.OutOfMemory as e:
        return e
    say("reading the compiled program")
    return compiled


def _analyse(
    compiled: aot.AotResult,
    program: Program,
    topology: Machine,
    job: tables.PlannedJob,
    schedule: pipeline.PipelineSchedule | None,
    layers: Layers,
) -> dict[str, Any]:
    """The part of a plan that comes from the compiled program."""
    module = parse_module(compiled.hlo_text)
    costs = costs_of(module, layers, tile=topology.tile)
    work = tables.work(costs, topology)
    collectives = tables.collectives(costs, topology)
    some: dict[str, Any] = {}
    if pipelines := pipeline.pipelines(module, costs, topology, schedule):
        some["pipelines"] = pipelines
    if isinstance(topology, Cluster):
        some["mesh_axes"] = mesh_order.mesh_plan(costs, program.mesh, topology)
        some["number_formats"] = tables.number_formats(costs)
    host = host_link.host_plan(module, costs, topology, compiled.memory)
    if host:
        some["host"] = host
    return some | {
        "memory": breakdown.memory_plan(
            module, compiled.memory, program.signature, topology.hbm_bytes, layers
        ),
        "work": work,
        "collectives": collectives,
        "time": tables.time(job, topology, work, collectives, host.get("waiting_seconds", 0.0)),
    }


def pipeline_schedule(
    params: Params, mesh: Mesh, stacks: Sequence[tuple[str, int]] = ()
) -> pipeline.PipelineSchedule | None:
    """The schedule of a model's pipelines, from task.pipeline of an experiment; None for a model without them.

    Its micro-batches are those that one device works on.

    Args:
        stacks: the name of each stack of equal blocks and its number of blocks.
    """
    settings = settings_of(params.task)
    if settings is None:
        return None
    num = settings.micro_batches // settings.Replicas(params.task.activation_split or {}, mesh)
    blocks = tuple(stacks)
    name, splits = settings.schedule, settings.splits
    return pipeline.PipelineSchedule(name, settings.stages, num, settings.repeats, blocks, splits)


def describe_job(
    request: Request, params: Params, task: BaseTask
) -> tuple[Step, tables.PlannedJob]:
    """The step to lower, and what one run of it takes in and puts out."""
    inputs = params.input.Instantiate()
    counts = task.Costs().BatchCounts(inputs.BatchSpec())
    if request.what == TRAIN:
        step = train_step(task, inputs, params.train.num_micro_batches)
        budget = request.token_budget if task.UNIT == "tokens" else 0.0
        flops = task.Costs().StepFlops(inputs.BatchSpec())
    else:
        programs = task.DecodePrograms(inputs, request.prompt, request.reply)
        step, budget, flops = programs[request.what == DECODE], 0.0, 0
        *taken, made = counts
        if request.what == DECODE:  # which takes in nothing, and puts out one unit for each row
            counts = dict.fromkeys(taken, 0) | {made: inputs.p.batch_size}
        else:
            read = max(math.prod(spec.shape) for spec in flatten(step.arg_specs[1]))
            counts = {next(iter(counts)): read}
    job = tables.PlannedJob(
        request.model, request.override, request.what, counts, task.UNIT, budget, flops
    )
    return step, job


def planned_mesh(params: Params, num_devices: int, text: str = "") -> Mesh:
    """`text`, or the experiment's own mesh laid over so many devices.

    Raises:
        ShardingError: a text that does not read as a mesh, or devices that it cannot be laid over.
    """
    mesh = make_mesh(params, text, num_devices)
    if mesh.size != num_devices:
        raise PlanError(f"--mesh={text} has {mesh.size} devices, the topology {num_devices}")
    return mesh


def topology_memory(topology: Machine) -> Memory:
    """The memory of a described machine, as recomputing.chosen_form takes it."""
    return Memory(topology.hbm_bytes, "each device's")
