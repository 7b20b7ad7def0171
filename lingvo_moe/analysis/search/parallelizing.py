"""Finds a strategy for a model on a machine: enumerate, estimate, compile the best few, verify the winner.

The compiler that will run the program is the judge: a strategy's memory, collectives and seconds are those of its plan
(step_plan.py). Estimates (analysis/search/strategies) only choose what is compiled.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.explain.verifying import VerifyError
from lingvo_moe.analysis.plans import step_plan
from lingvo_moe.analysis.plans.machines.base_machine import Machine, PlanError
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.machines.ring import Ring, here
from lingvo_moe.analysis.plans.machines.slices import machines
from lingvo_moe.analysis.plans.measuring import measured_step
from lingvo_moe.analysis.plans.step_plan import Say
from lingvo_moe.analysis.search.result_cache import cached_plan, cached_verification
from lingvo_moe.analysis.search.strategies.candidate import Candidate
from lingvo_moe.analysis.search.strategies.estimates import Estimate
from lingvo_moe.analysis.search.strategies.mesh_layout import MeshLayout
from lingvo_moe.analysis.search.strategies.objectives import CHIP_DAYS, SMALLEST, SPEED
from lingvo_moe.analysis.search.strategies.ranking import Ranking, Tried
from lingvo_moe.analysis.search.strategies.search_budget import SearchBudget
from lingvo_moe.analysis.search.strategies.space import Space
from lingvo_moe.analysis.search.strategies.strategy_file import StrategyError, as_override, to_text
from lingvo_moe.analysis.search.strategies.workload import Workload, read_workload
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import did_you_mean, either
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console import units
from lingvo_moe.core.console.flags import join_overrides
from lingvo_moe.core.console.mistakes import one_line
from lingvo_moe.core.engine.device_memory import memory_of
from lingvo_moe.core.engine.program_analysis import ERROR
from lingvo_moe.core.pipeline.schedule import DATA, STAGE
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.core.sharding.letters import axes_of, axis_of
from lingvo_moe.core.state.offload import items_of

_DTYPES = ("float32", "bfloat16", "float16")  # of activations
_FEW = 8  # devices on which a winner is run as it is


@dataclass(frozen=True)
class Search:
    """A search: the model, the machine and the limits."""

    model: str  # an experiment
    # As step_plan.Request; without sizes where the objective chooses the machine; '' for what is here.
    topology: str = ""
    # The devices of this process, where `topology` is ''; the best few are measured on them.
    devices: int = 0
    override: str = ""  # the text of --model_params_override
    # Types of activations that are allowed beside the experiment's own.
    dtypes: tuple[str, ...] = ()
    objective: str = SPEED  # one of objectives.OBJECTIVES
    memory: int = 0  # bytes of a device that may be used; 0 for all
    compiles: int = 6  # at most so many programs are compiled
    # No program is begun that should end after these; the first one always is.
    seconds: float = 600.0
    known_faults: str = ERROR  # see step_plan.Request; a strategy that meets one is refused
    verify: bool = True  # whether the winner runs, shrunk, before it is handed out


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    search: Search  # with the topology that was chosen
    machine: Machine  # which the topology names
    best: Tried  # the winner
    tried: list[Tried]  # all that was compiled, in order
    candidates: tuple[int, int]  # how many there were, and how many of them may fit
    verified: str  # the mesh on which the winner was run against one device; '' if it was not
    # The limit that ended the search, how much was left, and flags that try more of it; '' if nothing else should beat
    # the winner.
    ended: str = ""

    def ToText(self) -> str:
        """The strategy file of the winner."""
        plan = self.best.plan
        assert plan is not None
        memory, hosted = plan["memory"], plan.get("host")
        how = "measured" if isinstance(self.machine, Ring) else "estimated"
        about = [
            f"{self.search.model} on {self.machine.name}: {units.duration(self.best.step_seconds)} a step "
            f"({how}), {units.size(memory['needed'])} of {units.size(memory['hbm'])} on each device"
            + (f", {units.size(hosted['needed'])} of its host's memory" if hosted else ""),
            *(
                [f"beside --model_params_override='{self.search.override}'"]
                if self.search.override
                else []
            ),
        ]
        return to_text(self.best.overrides, about)

    def Ranked(self) -> list[tuple[Tried, str]]:
        """All that was compiled, the best first, each with why it was or was not taken."""
        order = sorted(self.tried, key=lambda tried: (tried is not self.best, tried.step_seconds))
        return [(tried, self._Why(tried)) for tried in order]

    def _Why(self, tried: Tried) -> str:
        if tried is self.best:
            return f"best; verified over {self.verified}" if self.verified else "best; not verified"
        if tried.refused:
            return tried.refused
        if tried.plan is None or not tried.plan["memory"]["fits"]:
            missing = tried.plan["memory"]["misses_by"] if tried.plan else None
            return f"misses by {units.size(missing)}"
        return f"{tried.step_seconds / self.best.step_seconds:.2f} times as long"

    def ToJson(self) -> dict[str, Any]:
        """The search and its result as plain data."""
        return {
            "version": 1,
            "model": self.search.model,
            "override": self.search.override,
            "topology": self.machine.name,
            "candidates": self.candidates[0],
            "may_fit": self.candidates[1],
            "verified": self.verified,
            "ended": self.ended,
            "ranking": [
                {
                    "strategy": tried.name,
                    "overrides": dict(tried.overrides),
                    "why": why,
                    "estimated_seconds": tried.seconds,
                    "plan": tried.plan,
                }
                for tried, why in self.Ranked()
            ],
        }


class NoneFits(StrategyError):
    """No strategy fits the machine."""


def find(
    search: Search,
    cache_dir: Path | None,
    say: Say = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """The best strategy of a model on a machine.

    Args:
        cache_dir: of plans, verified steps and compiled programs; None to cache nothing.

    Raises:
        NoneFits: with what lacks.
        ValueError: of some subclass: an experiment, override or topology that cannot be.
    """
    budget = SearchBudget(search.compiles, search.seconds, search.verify, clock)
    params = registry.GetParams(search.model, search.override)
    check_override(search.override)
    say(f"reading the work of a step of {search.model}")
    work = read_workload(params)
    names = _machines(search, params, work)
    for name in names:
        try:
            on_it = replace(search, topology=name)
            return _Finder(on_it, params, work, budget, cache_dir, say).Run()
        except NoneFits as e:
            left = len(names) - 1 - names.index(name)
            if left and budget.elapsed > search.seconds:
                raise NoneFits(f"{e}. {left} more machines were not tried") from None
            if not left:
                raise
            say(str(e))
    raise NoneFits(
        f"{search.model} divides over no machine of {search.topology} whose devices can hold its state"
    )


def check_override(override: str) -> None:
    """Raises StrategyError for a parameter that the search chooses: a run would apply it after the strategy."""
    for path, _ in registry.split_override(override):
        if path in registry.CHOSEN:
            raise StrategyError(
                f"--model_params_override: {path} is what the search chooses; leave it out"
            )


class _Finder:
    """The search on one machine."""

    def __init__(
        self,
        search: Search,
        params: Params,
        work: Workload,
        budget: SearchBudget,
        cache_dir: Path | None,
        say: Say,
    ):
        self._search, self._cache_dir, self._say = search, cache_dir, say
        self._budget, self._ended = budget, ""
        self._machine = _machine(search)
        self._memory = _memory(search, self._machine)
        dtypes = _dtypes(search, params)
        self._space = Space(params, work, self._machine, dtypes)
        self._written = _as_written(params, self._machine.num_devices)
        self._found = self._space.Estimated(self._memory)
        say(
            f"{self._found.count} candidates on {self._machine.name}, of which {self._found.may_fit} may fit, "
            f"estimated in {self._found.seconds:.1f} s"
        )
        # The experiment's own strategy may offload otherwise than any candidate.
        if not self._found.kept and not items_of(params.train.offload):
            raise NoneFits(_lacks(search, self._machine, self._memory, self._found.least))

    def Run(self) -> Found:
        ranking = Ranking(self._found.kept, self._memory)
        if self._written is not None:
            self._found.kept.setdefault(self._written, self._space.estimator.Of(self._written))
            ranking.Add(self._Compiled(self._written, ranking))
        verified = ""
        while True:
            self._CompileMore(ranking)
            best = ranking.best
            if best is None or not self._search.verify:
                break
            verified = self._Verified(best)
            if verified:
                break
        if best is None:
            raise NoneFits(_none_compiled(self._search, self._machine, ranking.tried, self._ended))
        return Found(
            self._search,
            self._machine,
            best,
            ranking.tried,
            (self._found.count, self._found.may_fit),
            verified,
            self._ended,
        )

    def _CompileMore(self, ranking: Ranking) -> None:
        """Compiles candidates until none should beat the best, or the search is over."""
        while True:
            if ranking.NothingFits():
                self._space.AddOffloads(self._found, self._memory)
            following = ranking.Next()
            limit = self._budget.Limit(len(ranking.tried))
            self._ended = self._WhyEnded(limit, ranking, following) if limit and following else ""
            if limit or not following:
                return
            ranking.Add(self._Compiled(following[0], ranking))

    def _WhyEnded(self, limit: str, ranking: Ranking, left: Sequence[Candidate]) -> str:
        """Says that a limit ended the search although these candidates are left."""
        tried, first = len(ranking.tried), left[0]
        seconds = self._found.kept[first].Seconds(ranking.Correction(first))
        return (
            f"{limit} ended the search after {units.duration(self._budget.elapsed)} and {tried} of "
            f"{self._found.count:,} candidates. By estimate {len(left):,} of the others should be faster, first of all "
            f"{first} ({units.duration(seconds)} a step): {self._budget.Advice(tried)} tries more"
        )

    def _Compiled(self, candidate: Candidate, ranking: Ranking) -> Tried:
        name, overrides = str(candidate), candidate.Overrides()
        if candidate == self._written:
            name, overrides = "as written", {"train.mesh": str(candidate.layout.mesh)}
        seconds = self._found.kept[candidate].Seconds(ranking.Correction(candidate))
        self._say(f"compiling {name}: {units.duration(seconds)} a step by estimate")
        tried = Tried(candidate, name, overrides, seconds)
        try:
            with self._budget.Working():
                tried.plan = self._Plan(candidate, joined(self._search.override, overrides))
        except ValueError as e:  # a known fault, or what the step's own checks refuse
            tried.refused = one_line(e)
        if tried.plan is not None and tried.plan["memory"]["fits"]:
            needed = tried.plan["memory"]["needed"]
            if needed > self._memory:
                tried.refused = f"needs {units.size(needed)} of {units.size(self._memory)}"
        return tried

    def _Plan(self, candidate: Candidate, override: str) -> dict[str, Any]:
        """The plan of a candidate, or its measured step. Raises as these do."""
        model, faults = self._search.model, self._search.known_faults
        if isinstance(self._machine, Ring):
            return measured_step(model, override, candidate.layout.mesh, self._memory, faults)
        request = step_plan.Request(model, self._search.topology, override, known_faults=faults)
        return cached_plan(request, self._cache_dir, self._say)

    def _Verified(self, tried: Tried) -> str:
        """The small mesh on which a strategy gives what one device gives; '' if it does not, and it is refused."""
        mesh = small_mesh(tried.candidate.layout.mesh)
        if mesh.size == 1:
            return "one device"
        self._say(f"verifying over mesh {mesh}: {tried.name}")
        override = joined(self._search.override, tried.overrides)
        override = join_overrides(override, f"train.mesh={mesh}", *_pipeline_over(mesh))
        try:
            with self._budget.Working():
                cached_verification(self._search.model, mesh, override, self._cache_dir, self._say)
        except VerifyError as e:
            tried.refused = f"computes something else than one device: {e}"
            return ""
        except ValueError as e:
            tried.refused = f"cannot be run over mesh {mesh}: {one_line(e)}"
            return ""
        return str(mesh)


def joined(override: str, overrides: Mapping[str, str]) -> str:
    """An override with the parameters of a strategy after it."""
    return join_overrides(override, as_override(overrides, "the search"))


def small_mesh(mesh: Mesh) -> Mesh:
    """A mesh with the same axes, of two devices each where there are more than one; the mesh itself, if it is small."""
    if mesh.size <= _FEW:
        return mesh
    return Mesh(mesh.axis_names, tuple(min(n, 2) for n in mesh.shape))


def _machine(search: Search) -> Machine:
    if search.topology:
        return parse_machine(search.topology)
    memory = memory_of("pjrt", Mesh(("data",), (search.devices,)))
    if not memory.size and not search.memory:
        raise StrategyError("the memory of the devices here is not known; give --memory in GiB")
    return here(search.devices, (memory.size or 0) // memory.devices or search.memory)


def _memory(search: Search, machine: Machine) -> int:
    """Bytes of a device that may be used. Raises StrategyError: it has fewer."""
    if search.memory > machine.hbm_bytes:
        raise StrategyError(
            f"--memory={search.memory / 2**30:g}: a device of {machine.name} has {units.size(machine.hbm_bytes)}, so "
            "this limits nothing; leave it out, or give less"
        )
    return search.memory or machine.hbm_bytes


def _machines(search: Search, params: Params, work: Workload) -> list[str]:
    """The machines to search on, in this order."""
    if ":" in search.topology or not search.topology:
        if search.objective != SPEED:
            raise StrategyError(
                f"--objective={search.objective}: chooses a machine; give --topology without sizes, e.g. "
                f"{search.topology.split(':')[0] or 'v5p'}"
            )
        return [search.topology]
    if search.objective == SPEED:
        raise StrategyError(
            f"--topology={search.topology}: say how large it is, e.g. v5p:4x4x4, or choose --objective="
            f"{SMALLEST} or {CHIP_DAYS}"
        )
    costs: dict[str, float] = {}
    for name in machines(search.topology):
        machine = parse_machine(name)
        memory = _memory(search, machine)
        space = Space(params, work, machine, _dtypes(search, params))
        if seconds := space.Estimated(memory).Fastest(memory):
            costs[name] = seconds * machine.num_chips
    if search.objective == CHIP_DAYS:
        return sorted(costs, key=lambda name: costs[name])
    return list(costs)


def _dtypes(search: Search, params: Params) -> tuple[str, ...]:
    for dtype in search.dtypes:
        if dtype not in _DTYPES:
            raise StrategyError(
                f"--activations={dtype}: must be {either(_DTYPES)}{did_you_mean(dtype, _DTYPES)}"
            )
    default = params.task.fprop_dtype or params.task.dtype or "float32"
    return ("", *(d for d in search.dtypes if d != default))


def _as_written(params: Params, num_devices: int) -> Candidate | None:
    """The experiment's own strategy over so many devices; None if it cannot be laid over them."""
    try:
        mesh = step_plan.planned_mesh(params, num_devices)
    except (PlanError, ShardingError):
        return None
    task = params.task
    activations, weights = (
        tuple((letter, axis_of(axes_of(axis))) for letter, axis in (split or {}).items())
        for split in (task.activation_split, task.weight_split)
    )
    if not {a for _, axis in (*activations, *weights) for a in axes_of(axis)} <= set(
        mesh.axis_names
    ):
        return None
    layout = MeshLayout(mesh, activations, weights)
    remat = task.remat if isinstance(task.remat, str) else tuple(task.remat)
    micro_batches = params.train.num_micro_batches
    if task.pipeline.stages > 1:
        micro_batches = max(1, task.pipeline.micro_batches // layout.size(DATA))
    offload, repeats = items_of(params.train.offload), task.pipeline.repeats
    return Candidate(layout, params.train.shard_state, remat, "", micro_batches, offload, repeats)


def _pipeline_over(mesh: Mesh) -> Iterator[str]:
    """Overrides of a pipeline with as many stages as a small mesh has; none where it has no axis of stages."""
    if STAGE in mesh.axis_names:
        stages = mesh.axis_size(STAGE)
        replicas = mesh.axis_size(DATA) if DATA in mesh.axis_names else 1
        yield f"task.pipeline.stages={stages}"
        yield f"task.pipeline.micro_batches={2 * stages * replicas}"
        yield "task.pipeline.splits=[]"


def _lacks(
    search: Search, machine: Machine, memory: int, least: tuple[Candidate, Estimate] | None
) -> str:
    if least is None:
        return (
            f"{search.model} divides over the {machine.num_devices} devices of {machine.name} in no way: the batch and "
            "the groups of tokens have to be multiples of the devices, but for those that shard heads, hidden units or "
            "the vocabulary"
        )
    candidate, estimate = least
    return (
        f"{search.model} fits {machine.name} under no strategy: weights, slots and the inputs of blocks alone need "
        f"{units.size(estimate.least)} of {units.size(memory)} on each device, where they need least ({candidate}), so "
        f"{units.size(estimate.least - memory)} are missing"
    )


def _none_compiled(search: Search, machine: Machine, tried: list[Tried], ended: str) -> str:
    said = [
        f"{search.model} fits {machine.name} under none of the {len(tried)} strategies that were tried"
    ]
    misfits = [
        t.plan["memory"]["misses_by"] for t in tried if t.plan and not t.plan["memory"]["fits"]
    ]
    if misfits:
        said.append(f"the one that comes nearest misses by {units.size(min(misfits))}")
    refused = [t for t in tried if t.refused]
    if refused:
        said.append(f"of the last one that was refused, {refused[-1].name}: {refused[-1].refused}")
    if ended:
        said.append(ended)
    return "; ".join(said)
