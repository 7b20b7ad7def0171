"""The figures of a compiled program's pipelines: ticks by phase, their seconds, the bubble, and the bytes passed on.

A tick is one iteration of a pipeline's loop (programs/hlo/pipelines.py); all stages take part in each. There are three
kinds of work: the forward pass F, the backward pass B, and the gradients of weights W where the schedule has them
apart. The loops' trip counts say for how many ticks the program does each kind; a stage has V M ticks' worth of each to
do, for M micro-batches and V chunks of layers a stage. It is idle in the others. The share of idle ticks, each weighted
by the seconds of its kind, is the bubble. A loop's tick may do several kinds, of several stacks of layers; seconds of a
kind are sums and differences of the loops' ticks.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lingvo_moe.analysis.plans.machines.base_machine import Machine, PlanError
from lingvo_moe.analysis.plans.work.costs import Cost
from lingvo_moe.analysis.plans.work.seconds import execution_seconds
from lingvo_moe.analysis.programs.hlo.instructions import Computation, Instruction
from lingvo_moe.analysis.programs.hlo.module import Executed, Module
from lingvo_moe.analysis.programs.hlo.pipelines import (
    BACKWARD,
    FORWARD,
    LOSS,
    PipelineLoop,
    TickWork,
    loop_of_operation,
    pipeline_loop,
)
from lingvo_moe.core.pipeline.blocks import StageBlocks, padding

_PERMUTE = "collective-permute"
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


@dataclass(frozen=True)
class PipelineSchedule:
    """The schedule of a model's pipelines, as its parameters have it."""

    name: str  # e.g. '1f1b'
    stages: int  # K
    micro_batches: int  # M
    repeats: int = 1  # V, chunks of layers that each stage has
    # The name of each stack of equal blocks and its number of blocks.
    stacks: tuple[tuple[str, int], ...] = ()
    splits: tuple[int, ...] = ()  # the blocks at which stages end; () for stages as equal as can be


@dataclass
class TimedLoop:
    """A loop over ticks."""

    name: PipelineLoop  # the name of the pipeline and of what its ticks do
    ticks: int  # its trip count
    runs: int  # how often a run of the program enters it
    # Of one tick, estimated: work and collectives, which are taken not to overlap. None for a single tick whose loop
    # the compiler removed.
    seconds: float | None
    # What a tick sends from stage to stage.
    permutes: list[dict[str, Any]] = field(default_factory=list)


def pipelines(
    module: Module,
    costs: Sequence[Cost],
    machine: Machine,
    schedule: PipelineSchedule | None = None,
) -> list[dict[str, Any]]:
    """Returns the plan's `pipelines`: one dict for each pipeline of a program, in the order of their loops.

    Args:
        schedule: None: unknown, so that there is no bubble.

    Raises:
        PlanError: the loops have fewer ticks than the schedule's micro-batches need.
    """
    reader = _LoopReader(module, costs, machine)
    loops_of: dict[str, list[TimedLoop]] = defaultdict(list)
    for loop in reader.loops:
        name = pipeline_loop(loop.instruction.op_name)
        assert name is not None
        loops_of[name.pipeline].append(reader.Read(loop, name))
    for name, runs in reader.Removed().items():
        if name not in {loop.name for loop in loops_of[name.pipeline]}:
            loops_of[name.pipeline].append(TimedLoop(name, 1, runs, None))
    return [_describe(name, loops, schedule) for name, loops in loops_of.items()]


def _describe(
    name: str, loops: list[TimedLoop], schedule: PipelineSchedule | None
) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": name,
        "loops": [
            {
                "phase": loop.name.phase,
                "ticks": loop.ticks,
                "runs": loop.runs,
                "tick_seconds": loop.seconds,
                "seconds": None if loop.seconds is None else loop.runs * loop.ticks * loop.seconds,
                "permutes": loop.permutes,
            }
            for loop in loops
        ],
    }
    out["seconds"] = sum(loop["seconds"] or 0.0 for loop in out["loops"])
    if schedule is None:
        return out
    return out | {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "repeats": schedule.repeats,
        "bubble": bubble(name, loops, schedule),
        **_blocks(schedule),
    }


def _blocks(schedule: PipelineSchedule) -> dict[str, Any]:
    """The number of blocks of each stack, and the share of padding in the stages' work."""
    if not schedule.stacks:
        return {}
    stacks = [
        StageBlocks(num, schedule.stages, schedule.repeats, schedule.splits)
        for _, num in schedule.stacks
    ]
    return {"blocks": dict(schedule.stacks), "padding": padding(stacks)}


def bubble(name: str, loops: Iterable[TimedLoop], schedule: PipelineSchedule) -> float | None:
    """The share of a stage's time in a pipeline's loops in which it is idle.

    Args:
        name: the pipeline's, for messages.
        schedule: says how many ticks' worth of each kind of work a stage has.

    Returns:
        None if it depends on seconds that do not follow from the loops, e.g. since the compiler removed some.

    Raises:
        PlanError: there are fewer ticks than that, so that the loops are not of this schedule.
    """
    loops = list(loops)
    ticks: dict[TickWork, int] = defaultdict(int)
    for loop in loops:
        for work in loop.name.works:
            if work.kind != LOSS:  # all stages share it, so none is idle
                ticks[work] += loop.ticks
    useful = schedule.micro_batches * schedule.repeats
    for work, count in ticks.items():
        if work.kind in (FORWARD, BACKWARD) and count < useful:
            raise PlanError(
                f"pipeline {name!r} has {count} {' '.join(work).strip()} ticks, too few for micro_batches="
                f"{schedule.micro_batches} and repeats={schedule.repeats}: its loops are not of this schedule"
            )
    if len(set(ticks.values())) == 1:  # each kind weighs as much as the others
        total = next(iter(ticks.values()))
        return (total - useful) / total
    idle = _seconds({work: count - useful for work, count in ticks.items()}, loops)
    in_all = _seconds(ticks, loops)
    return None if idle is None or not in_all else idle / in_all


def _seconds(ticks: Mapping[TickWork, int], loops: Sequence[TimedLoop]) -> float | None:
    """Seconds of so many ticks of each kind of work; None if they do not follow from the seconds of the loops."""
    timed = [loop for loop in loops if loop.seconds is not None]
    works = sorted({*ticks, *(work for loop in timed for work in loop.name.works)})
    does = np.array([[float(work in loop.name.works) for work in works] for loop in timed])
    wanted = np.array([float(ticks.get(work, 0)) for work in works])
    if not timed:
        return None
    # How often to add each loop's tick, so that these ticks do the wanted work.
    times = np.linalg.lstsq(does.T, wanted, rcond=None)[0]
    if not np.allclose(does.T @ times, wanted, atol=1e-6):
        return None
    return float(times @ np.array([loop.seconds for loop in timed], float))


class _LoopReader:
    """Reads the loops over ticks."""

    def __init__(self, module: Module, costs: Sequence[Cost], machine: Machine):
        self._module = module
        self._costs = costs
        self._one = {cost.name: execution_seconds(cost, machine) for cost in costs}
        self._collectives = {cost.name for cost in costs if cost.collective is not None}
        self._times: dict[str, int] = {}
        self.loops: list[Executed] = []
        for executed in module.executions():
            instruction = executed.instruction
            self._times[instruction.name] = executed.times
            if instruction.opcode == "while" and pipeline_loop(instruction.op_name):
                self.loops.append(executed)
        self._inside = {
            i.name: computation
            for computation in module.computations.values()
            for i in computation.instructions
        }

    def Removed(self) -> dict[PipelineLoop, int]:
        """The loops that the compiler removed, since they have a single tick, and how often this tick runs.

        It is known by the names of what it computes or sends.
        """
        within = {loop.instruction.name for loop in self.loops}
        removed: dict[PipelineLoop, int] = {}
        for cost in self._costs:
            works = cost.opcode == "fusion" or cost.flops or cost.collective is not None
            if works and not within & set(cost.loops):
                name = loop_of_operation(self._inside[cost.name].by_name[cost.name].op_name)
                if name is not None:
                    removed[name] = cost.times
        return removed

    def Read(self, executed: Executed, name: PipelineLoop) -> TimedLoop:
        loop = executed.instruction
        body = self._module.computation(loop.attribute("body"))
        in_all = self._times.get(body.root.name, 0)  # ticks in one run of the program
        result = TimedLoop(name, in_all // max(executed.times, 1), executed.times, 0.0)
        if not in_all:
            return result
        inside = [cost for cost in self._costs if loop.name in cost.loops]
        result.seconds = sum(cost.times * self._one[cost.name] for cost in inside) / in_all
        rows: dict[int, dict[str, Any]] = {}
        for cost in inside:
            if cost.collective is None or cost.collective.kind != _PERMUTE:
                continue
            use, one, count = cost.collective, self._one[cost.name], cost.times / in_all
            row = rows.setdefault(
                use.bytes,
                {"bytes": use.bytes, "count": 0, "seconds": 0.0, "overlapped_seconds": 0.0},
            )
            row["count"] += count
            row["seconds"] += count * one
            row["overlapped_seconds"] += count * min(one, self._meanwhile(cost.name))
        result.permutes = sorted(rows.values(), key=lambda row: -row["seconds"])
        return result

    def _meanwhile(self, name: str) -> float:
        """Seconds of the work that is scheduled between the start and the end of a transfer; 0 if it has no start."""
        inside = self._inside[name]
        start = inside.by_name[name]
        received = _received(start, inside)
        if received is None:
            return 0.0
        order = {i.name: at for at, i in enumerate(inside.instructions)}
        begins = max(order[name], order[received.name])
        dones = [i for i in inside.users.get(received.name, ()) if i.opcode.endswith("-done")]
        ends = min((order[done.name] for done in dones), default=begins)
        between = inside.instructions[begins + 1 : ends]
        return sum(self._work(instruction) for instruction in between)

    def _work(self, instruction: Instruction) -> float:
        """Seconds of an instruction's work without collectives; of a loop's, what its body does in all."""
        if instruction.opcode == "while":
            times = self._times.get(instruction.name, 0)
            nested = (
                c for c in self._costs if instruction.name in c.loops and c.collective is None
            )
            return sum(c.times * self._one[c.name] for c in nested) / max(times, 1)
        return (
            0.0 if instruction.name in self._collectives else self._one.get(instruction.name, 0.0)
        )


def _received(start: Instruction, inside: Computation) -> Instruction | None:
    """The instruction whose -done ends a transfer: a start itself, or of a `send` the `recv` with the same name."""
    if start.opcode.endswith("-start"):
        return start
    sent = _RENDEZVOUS.search(start.attributes)
    if start.opcode != "send" or sent is None:
        return None
    for instruction in inside.instructions:
        if instruction.opcode == "recv":
            match = _RENDEZVOUS.search(instruction.attributes)
            if match is not None and match[1] == sent[1]:
                return instruction
    return None
