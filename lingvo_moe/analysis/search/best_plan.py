"""Plans that are chosen among several: of the layouts by name the fastest, of a kind of machines the smallest."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.plans import step_plan
from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.machines.slices import machines
from lingvo_moe.analysis.plans.memory import state
from lingvo_moe.analysis.plans.step_plan import Lowering, Request, Say
from lingvo_moe.analysis.programs.hlo.instructions import HloError
from lingvo_moe.analysis.search.layouts import layouts
from lingvo_moe.analysis.search.strategies.strategy_file import StrategyError
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console import units
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.meshes import check_divisible

# By how many times a program must exceed a machine's memory to pass over that machine without compiling: the
# compiler's figures are not exactly proportional.
_WIDE_MARGIN = 1.1


def laid_out(
    layout: str,
    request: Request,
    cache_dir: Path | None,
    say: Say = lambda _: None,
    lowering: Lowering | None = None,
) -> dict[str, Any]:
    """The plan of a layout by name; for AUTO the one that fits and has the fastest step, or else misses by the least.

    Arguments but the first are those of make_plan; '' is the experiment's own layout. Raises as make_plan and layouts.
    """
    if not layout:
        return step_plan.make_plan(request, cache_dir, say, lowering)
    num_devices = parse_machine(request.topology).num_devices
    overrides = layouts(layout, request.model, request.override, num_devices)
    plans: list[dict[str, Any]] = []
    refusal: ValueError | None = None
    for name, override in overrides.items():
        say(f"--layout={name}")
        try:
            in_it = replace(request, override=override)
            plan = step_plan.make_plan(in_it, cache_dir, say, lowering)
        except ValueError as e:  # e.g. a known fault of the partitioner
            say(f"--layout={name}: {e}")
            refusal = e
        else:
            plans.append(plan | {"layout": name, "override": request.override})

    def order(plan: Mapping[str, Any]) -> tuple[bool, float]:
        fits = plan["memory"]["fits"]
        return not fits, plan["time"]["step_seconds"] if fits else plan["memory"]["misses_by"]

    if refusal and not plans:
        raise refusal
    return min(plans, key=order)


def smallest_slice(
    request: Request, cache_dir: Path | None, say: Say = lambda _: None, layout: str = ""
) -> dict[str, Any]:
    """The plan for the smallest machine that the model fits, of the generation or card in `request.topology`.

    `layout` is as for laid_out.

    Machines that are far too small are passed over: all devices together need no less memory when they are more.

    Raises:
        FitsNone: it fits no machine of that kind.
        PlanError: no such generation or card.
    """
    tried: list[str] = []
    needed = 0  # bytes of all devices together, on the machine tried last
    for name in slices_to_try(request, layout):
        machine = parse_machine(name)
        if needed > _WIDE_MARGIN * machine.num_devices * machine.hbm_bytes:
            continue
        tried.append(name)
        plan = laid_out(layout, replace(request, topology=name), cache_dir, say)
        memory = plan["memory"]
        if memory["fits"]:
            return plan
        say(f"{name}: misses by {units.size(memory['misses_by'], 1)}")
        needed = machine.num_devices * memory["needed"]
    raise FitsNone(request, tried)


class FitsNone(PlanError):
    """A model that is too large for every slice of a generation, or every cluster of a card.

    Attributes:
        tried: the machines for which it was compiled.
    """

    def __init__(self, request: Request, tried: list[str]):
        self.tried = tried
        kind = "cluster" if request.topology.strip().lower() in CARDS else "slice"
        compiled = f"compiled for {', '.join(tried)}" if tried else "none can hold its state"
        super().__init__(
            f"{request.model} fits no {kind} of {request.topology} over which it divides: {compiled}"
        )


def slices_to_try(request: Request, layout: str = "") -> Iterator[str]:
    """The slices of a generation, or clusters of a card, over which the experiment divides, smallest first.

    Those are left out whose devices cannot hold its weights and, to train it, slots and gradients at a time.
    """
    if request.mesh:
        Mesh.parse(request.mesh)  # a mistake is no reason to pass over every slice

    @functools.cache
    def experiment(override: str) -> tuple[Params, BaseTask]:
        params = registry.GetParams(request.model, override)
        return params, params.task.Instantiate()

    def needed(count: int) -> Iterator[int]:
        """Bytes that each of `count` devices has to hold, in the experiment's layout or in those by name."""
        overrides = [request.override]
        if layout:
            named = layouts(layout, request.model, request.override, count)
            overrides = [*named.values()]
        for override in overrides:
            params, task = experiment(override)
            mesh = step_plan.planned_mesh(params, count, request.mesh)
            check_divisible(params, task, mesh)
            bytes_of = state.held(task, mesh)
            yield bytes_of.total if request.what == "train" else bytes_of.weights

    for name in machines(request.topology):
        topology = parse_machine(name)
        with contextlib.suppress(HloError, PlanError, ShardingError, StrategyError):
            if min(needed(topology.num_devices)) <= topology.hbm_bytes:
                yield name
