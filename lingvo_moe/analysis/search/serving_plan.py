"""The plan of serving: what reads prompts and a step of decoding, compiled for a machine, by layout and batch."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.plans import figures, step_plan
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.prices import SECONDS_AN_HOUR, LatencyLimits
from lingvo_moe.analysis.plans.step_plan import DECODE, PREFILL, Request, Say
from lingvo_moe.analysis.plans.tables import VERSION
from lingvo_moe.analysis.search.layouts import letter_sizes
from lingvo_moe.analysis.search.strategies.candidate import Candidate
from lingvo_moe.analysis.search.strategies.serving_layouts import serving_layouts
from lingvo_moe.core.config import registry
from lingvo_moe.core.console import units
from lingvo_moe.core.console.flags import join_overrides
from lingvo_moe.core.nested_map import flatten
from lingvo_moe.core.pages.tables import Column, Table, numbers, words
from lingvo_moe.core.sharding.letters import part_shape
from lingvo_moe.core.task.inspect import bytes_per_device, itemsize_of

SERVE = "serve"


def make_serving_plan(
    request: Request, batches: Sequence[int], cache_dir: Path | None, say: Say = lambda _: None
) -> dict[str, Any]:
    """The plan, as docs/plan_json.md describes it.

    Args:
        request: its `prompt` and `reply` are set. Weights are in the type of activations, unless its override says
            otherwise.
        batches: rows of all devices together; none: 1, 8, 32, 128 and so on, until the memory is full.

    Raises:
        ValueError: as make_plan.
    """
    machine = parse_machine(request.topology)
    task = registry.GetParams(request.model, request.override).task.Instantiate()
    rows = []
    for name, layout in serving_layouts(letter_sizes(task), machine.num_devices).items():
        say(f"layout {name}: {layout}")
        served = _Served(request, layout, cache_dir, say)
        for row in served.Rows(batches):
            rows.append({"layout": name, "mesh": str(layout.layout.mesh), **row})
    return {
        "version": VERSION,
        "model": request.model,
        "override": request.override,
        "what": SERVE,
        "prompt": request.prompt,
        "reply": request.reply,
        "topology": machine.Describe(),
        "rows": rows,
    }


class _Served:
    """A model in one layout on a machine."""

    def __init__(self, request: Request, layout: Candidate, cache_dir: Path | None, say: Say):
        self._request, self._layout, self._cache_dir, self._say = request, layout, cache_dir, say
        self._mesh = layout.layout.mesh
        self._machine = parse_machine(request.topology)
        # Rows are sharded over these axes in attention, and over those of groups on their way to experts.
        self._least = max(self._mesh.axis_size(layout.layout.Axes(letter)) for letter in "BG")

    def Rows(self, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
        """A row of the plan for each batch; where none are given, up to the first that does not fit."""
        done, prefill = 0, None
        for wanted in batches or _growing():
            batch = -(-wanted // self._least) * self._least
            if batch == done:
                continue
            done = batch
            weights, caches = self._Bytes(batch)
            row = {"batch": batch, "weights": weights, "caches": caches, "fits": False}
            row |= {"hbm": self._machine.hbm_bytes, "needed": weights + caches}
            if row["needed"] <= row["hbm"]:
                prefill = prefill or self._Plan(PREFILL, self._least)
                row |= self._Figures(row, prefill, self._Plan(DECODE, batch))
            yield row
            if not (batches or row["fits"]):
                return

    def _Override(self, batch: int) -> str:
        request = self._request
        task = registry.GetParams(request.model, request.override).task
        paths = {**self._layout.Overrides(), "input.batch_size": str(batch)}
        paths["task.dtype"] = task.fprop_dtype
        if task.num_experts:
            paths["task.num_groups"] = "0"  # decoding has none
        laid_out = ";".join(f"{path}={value}" for path, value in paths.items())
        return join_overrides(laid_out, request.override)

    def _Plan(self, what: str, batch: int) -> dict[str, Any]:
        request = replace(self._request, what=what, override=self._Override(batch))
        return step_plan.make_plan(request, self._cache_dir, self._say)

    def _Bytes(self, batch: int) -> tuple[int, int]:
        """The bytes that a device holds of the weights, and of the search's state and caches."""
        params = registry.GetParams(self._request.model, self._Override(batch))
        programs = params.task.Instantiate().DecodePrograms(
            params.input.Instantiate(), self._request.prompt, self._request.reply
        )
        state, cache, theta = programs[1].arg_specs
        weights = sum(bytes_per_device(spec, self._mesh) for spec in flatten(theta))
        sizes = (
            math.prod(part_shape(spec.shape, spec.split, self._mesh)) * itemsize_of(spec.dtype)
            for spec in flatten((state, cache))
        )
        return weights, sum(sizes)

    def _Figures(
        self, row: Mapping[str, Any], prefill: Mapping[str, Any], step: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The memory and the times of a batch, from the plans of both programs."""
        # Prompts are read while the caches of the batch lie in memory.
        reading = figures.needed(prefill) + row["caches"]
        needed = max(figures.needed(step), reading)
        fits = all(plan["memory"]["fits"] for plan in (prefill, step)) and needed <= row["hbm"]
        if not fits:
            return {"needed": needed}
        between, reads = (plan["time"]["step_seconds"] for plan in (step, prefill))
        a_token = between / row["batch"] + reads / self._least / self._request.reply
        return {
            "fits": True,
            "needed": needed,
            "prompts": self._least,
            "prefill_seconds": reads,
            "step_seconds": between,
            "first_token_seconds": reads + between,
            "user_tokens_per_second": 1 / between,
            "chip_tokens_per_second": 1 / a_token / self._machine.num_chips,
            "chip_seconds_per_million": 1e6 * a_token * self._machine.num_chips,
        }


def _growing() -> Iterator[int]:
    """1, 8, 32, 128 and so on."""
    yield 1
    yield from (8 * 4**i for i in itertools.count())


def chosen(plan: Mapping[str, Any], limits: LatencyLimits | None) -> list[Mapping[str, Any]]:
    """The largest batch of each layout that keeps the limits, the cheapest first; without limits none."""
    best = dict[str, Mapping[str, Any]]()
    for row in filter(lambda row: row["fits"], plan["rows"]):
        if limits and limits.Keeps(row["first_token_seconds"], row["step_seconds"]):
            best[row["layout"]] = row
    return sorted(best.values(), key=lambda row: row["chip_seconds_per_million"])


def table(plan: Mapping[str, Any], limits: LatencyLimits | None, price: float | None) -> Table:
    """The rows of a plan, those that `chosen` returns marked.

    Args:
        price: of a chip-hour; None: costs are in chip-seconds.
    """
    marked = chosen(plan, limits)
    cost = "price of 1M" if price else "chip-seconds of 1M"
    columns = [*words("layout"), *numbers("batch", "weights", "caches", "memory of HBM")]
    times = ("first token", "between", "tokens/s a user", "tokens/s a chip", cost)
    columns += [Column(heading, estimated=True) for heading in times] + words("")
    rows = []
    for row in plan["rows"]:
        memory = f"{units.gib(row['needed'])} / {units.gib(row['hbm'])} GiB"
        cells = [
            row["layout"],
            f"{row['batch']:,}",
            *map(units.size, (row["weights"], row["caches"])),
        ]
        if row["fits"]:
            seconds = row["chip_seconds_per_million"]
            of_million = units.number(seconds * price / SECONDS_AN_HOUR if price else seconds)
            waits = map(units.duration, (row["first_token_seconds"], row["step_seconds"]))
            rates = (row[f"{of}_tokens_per_second"] for of in ("user", "chip"))
            cells += [memory, *waits, *map(units.number, rates), of_million]
        else:
            cells += [f"{memory}, does not fit", *[units.DASH] * len(times)]
        rows.append([*cells, "kept" if row in marked else ""])
    return Table(columns, rows)
