"""Describes what reports show of a plan: each section once, for the terminal and for the page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lingvo_moe.analysis.plans import figures
from lingvo_moe.analysis.plans.figures import PHASES, PartTime, Plan, get
from lingvo_moe.core.console import units
from lingvo_moe.core.pages.tables import Column, PageCell, Piece, Section, Table, numbers, words
from lingvo_moe.core.pipeline.blocks import describe_padding

_SECONDS = "seconds"
_ASIDE = " (seconds estimated)"
_PLACE = [*words("layer"), Column("part", numeric=False, wide=True), *words("phase")]


def _place(item: Mapping[str, Any]) -> list[str]:
    return [item[key] or units.DASH for key in ("layer", "part", "phase")]


def memory_pieces(plan: Plan) -> list[Piece]:
    """The kinds of memory of a device; one piece for all that a program needs which the compiler refused."""
    pieces = [Piece(figures.KINDS[k], k, n, units.size(n)) for k, n in figures.kinds(plan)]
    needed = figures.needed(plan)
    return pieces or [Piece("needed", "temporaries", needed, units.size(needed))]


def time_pieces(parts: Iterable[PartTime]) -> list[Piece]:
    """The time of some parts by phase, and that of the network."""
    parts = list(parts)
    seconds = {phase: sum(part.phases[phase] for part in parts) for phase in PHASES}
    seconds["network"] = sum(part.network for part in parts)
    return [Piece(k, k, s, units.duration(s)) for k, s in seconds.items()]


def holders(plan: Plan, most: int) -> Section | None:
    """The largest buffers that are live at the peak."""
    buffers = plan["memory"].get("holders")
    if not buffers:
        return None
    rows = [
        [
            PageCell(figures.KINDS[row["kind"]], colour=row["kind"]),
            *_place(row),
            units.size(row["bytes"]),
        ]
        for row in buffers[:most]
    ]
    if rest := buffers[most:]:
        size = units.size(sum(row["bytes"] for row in rest))
        rows.append([PageCell(f"{len(rest)} more"), "", "", "", size])
    columns = words("what", "layer", "part", "phase") + numbers("bytes")
    aside = " (traced through the compiled schedule)"
    return Section("What is live at the peak", [Table(columns, rows)], aside=aside)


def state(plan: Plan) -> Section | None:
    """The parts of the training state, and what a device would hold with other levels of train.shard_state."""
    about = plan.get("state")
    if not about:
        return None
    columns = words("part", "type", "memory") + numbers("in all", "of a device", "copies")
    rows = [
        [
            *(row[key] for key in ("part", "dtype", "memory")),
            *(units.size(row[key]) for key in ("bytes_total", "bytes")),
            f"{row['copies']:,.4g}",
        ]
        for row in about["parts"]
    ]
    by_level = {row["shard_state"]: units.size(row["bytes"]) for row in about["levels"]}
    chosen = by_level.pop(about["shard_state"])
    others = ", ".join(f"{size} with {level}" for level, size in by_level.items())
    notes = [f"train.shard_state={about['shard_state']} holds {chosen}; {others}."]
    if offloads := about.get("offloads"):
        others = ", ".join(f"{units.size(row['bytes'])} with {row['offload']}" for row in offloads)
        notes.append(f"With train.offload a device holds {others}.")
    return Section("Training state", [Table(columns, rows)], notes)


def hosts(plan: Plan, most: int | None = None) -> Section | None:
    """The moves from and to the hosts' memory, the longest first, and the memory that a host needs."""
    host = plan.get("host")
    if not host:
        return None
    columns = [*words("move"), *_PLACE, *numbers("a step", "bytes of one")]
    columns += [Column(heading, estimated=True) for heading in (_SECONDS, "waiting")]
    rows = [
        [
            row["direction"],
            *_place(row),
            f"{row['count']:,}",
            units.size(row["bytes"]),
            *(units.duration(row[key]) for key in ("seconds", "waiting_seconds")),
        ]
        for row in host["moves"]
    ]
    return Section(
        "Memory of the hosts", [Table(columns, rows).First(most)], _of_hosts(host), _ASIDE
    )


def _of_hosts(host: Mapping[str, Any]) -> list[str]:
    """Says how much memory a host needs, and how many seconds its link costs."""
    has = f" of {units.size(host['host_memory'])}" if host["host_memory"] else ""
    sentences = [
        f"Each device needs {units.size(host['needed'])} in its host's memory; a host of {host['host_devices']}"
        f" devices {units.size(host['needed_by_host'])}{has}."
    ]
    if host["host_memory"] and host["needed_by_host"] > host["host_memory"]:
        missing = units.size(host["needed_by_host"] - host["host_memory"])
        sentences.append(f"A host does not have that much: {missing} are missing.")
    if host["seconds"]:
        sentences.append(
            f"The link to the host ({units.rate(host['link_bandwidth'], 'B')} each way; {host['link_source']}) is busy "
            f"for {units.duration(host['seconds'])}, both directions added. The device waits for "
            f"{units.duration(host['waiting_seconds'])} of it, which counts in the step; "
            f"{units.share(host['hidden_seconds'] / host['seconds'])} is hidden behind other work or by the other "
            "direction."
        )
    return sentences


def time(plan: Plan) -> Table | None:
    """The time of a step by part of the model, the slowest first, and in all."""
    parts = figures.time_by_part(plan)
    columns = [
        *words("part"),
        *numbers("operations"),
        Column("traffic", wide=True),
        *(Column(heading, estimated=True) for heading in ("in all", "arithmetic", "memory")),
        *(Column(heading, estimated=True, wide=True) for heading in ("roofline", "compiler")),
        Column("network", estimated=True),
    ]
    rows = [_times(part.part.replace("_", " "), [part]) for part in parts]
    return Table(columns, rows, _times("in all", parts)) if parts else None


def _times(name: str, parts: Sequence[PartTime]) -> list[str]:
    """The cells of some parts together; a dash for zero."""
    estimates = (sum(part.estimates[key] for part in parts) for key in figures.ESTIMATES)
    seconds = sum(p.total for p in parts), *estimates, sum(p.network for p in parts)
    return [
        name,
        units.work(sum(part.flops for part in parts) or None),
        units.size(sum(part.num_bytes for part in parts) or None),
        *(units.duration(value or None) for value in seconds),
    ]


def pipelines(plan: Plan) -> Section | None:
    """The loops over ticks: a row for each loop, and for each further size of its permutes."""
    if not plan.get("pipelines"):
        return None
    columns = [
        *words("pipeline", "phase"),
        *numbers("ticks"),
        *(Column(heading, estimated=True) for heading in ("a tick", "in all")),
        *(Column(heading, wide=True) for heading in ("permutes a tick", "bytes of one")),
        *(Column(heading, estimated=True, wide=True) for heading in (_SECONDS, "overlapped")),
    ]
    rows = []
    for pipeline in plan["pipelines"]:
        name = pipeline["name"] or units.DASH
        for loop in pipeline["loops"]:
            runs = f"{loop['runs']} × " if loop["runs"] > 1 else ""
            cells = [
                name,
                loop["phase"].replace("_", " "),
                f"{runs}{loop['ticks']:,}",
                *(units.duration(loop[key]) for key in ("tick_seconds", "seconds")),
            ]
            for permute in loop["permutes"] or [None]:
                rows.append([*cells, *_permute(permute)])
                cells = [""] * len(cells)
            name = ""
    notes = [_schedule(pipeline) for pipeline in plan["pipelines"]]
    return Section("Pipelines", [Table(columns, rows)], notes, _ASIDE)


def _permute(permute: Mapping[str, Any] | None) -> list[str]:
    if permute is None:
        return [units.DASH] * 4
    seconds = permute["seconds"]
    return [
        f"{permute['count']:g}",
        units.size(permute["bytes"]),
        units.duration(seconds),
        units.share(permute["overlapped_seconds"] / seconds if seconds else None),
    ]


def _schedule(pipeline: Mapping[str, Any]) -> str:
    """Says a pipeline's schedule and its bubble."""
    name = pipeline["name"] or "pipeline"
    if "bubble" not in pipeline:
        return f"{name}: its schedule is not known, so neither is its bubble."
    repeats = f", {pipeline['repeats']} chunks a stage" if pipeline["repeats"] > 1 else ""
    bubble = (
        "The bubble is not known: seconds of each kind of work do not follow from these loops."
        if pipeline["bubble"] is None
        else f"The bubble is {units.share(pipeline['bubble'])} of a stage's time in these loops."
    )
    stacks = list((pipeline.get("blocks") or {}).items())
    padding = describe_padding(stacks, pipeline["stages"], pipeline["repeats"])
    return (
        f"{name}: {pipeline['schedule']} of {pipeline['stages']} stages and {pipeline['micro_batches']}"
        f" micro-batches{repeats}. {bubble}{padding and f' {padding}.'}"
    )


def collectives(plan: Plan, most: int | None = None) -> Table | None:
    """The collectives of a step, the slowest first; after `most` of them, the others together; and all of them."""
    items = figures.collectives(plan)
    if not items:
        return None
    located = any(map(figures.spans, items))
    spanned = "slices" if figures.get(plan, "topology.slices") else "nodes"
    columns = [*words("kind"), *_PLACE, *numbers(*[spanned] * located)]
    columns += [*numbers("a step", "bytes of one"), Column("devices", wide=True)]
    columns += [Column(_SECONDS, estimated=True)]
    rows = [
        [
            item["kind"],
            *_place(item),
            *[figures.spans(item)] * located,
            f"{item['count']:,}",
            units.size(item["bytes"]),
            f"{item['participants']:,}",
            units.duration(item.get("seconds")),
        ]
        for item in items[:most]
    ]

    def summed(what: str, some: Sequence[Mapping[str, Any]]) -> list[str]:
        count = sum(item["count"] for item in some)
        seconds = units.duration(sum(item.get("seconds") or 0.0 for item in some))
        return [what, *[""] * (3 + located), f"{count:,}", "", "", seconds]

    if most is not None and (rest := items[most:]):
        rows.append(summed(f"{len(rest)} more", rest))
    return Table(columns, rows, summed("in all", items))


def between_slices(plan: Plan, most: int | None = None) -> Section | None:
    """The collectives that cross TPU slices, the slowest first; None for a plan of a single slice.

    Bytes are those that a device sends to other slices, by one execution and by all of a step.
    """
    if not get(plan, "topology.slices") or not plan.get("time"):
        return None
    title = "Between slices, over the data-centre network"
    items = [item for item in figures.collectives(plan) if item.get("slices", 1) > 1]
    if not items:
        return Section(title, (), ["No collective crosses slices."], _ASIDE)
    columns = [*words("kind"), *_PLACE, *numbers("a step"), Column("sent by one", wide=True)]
    columns += [*numbers("sent a step"), Column(_SECONDS, estimated=True)]
    rows = [
        [
            item["kind"],
            *_place(item),
            f"{item['count']:,}",
            units.size(item["sent_between"]),
            units.size(item["count"] * item["sent_between"]),
            units.duration(item["seconds"]),
        ]
        for item in items
    ]
    sent = units.size(sum(item["count"] * item["sent_between"] for item in items))
    seconds = sum(item["seconds"] for item in items)
    note = (
        f"In all {sum(item['count'] for item in items):,} a step: each device sends {sent} to other slices in "
        f"{units.duration(seconds)}, {units.share(seconds / plan['time']['step_seconds'])} of the step. The rate is "
        "the data sheet's, not measured."
    )
    return Section(title, [Table(columns, rows).First(most)], [note], _ASIDE)


def mesh_axes(plan: Plan) -> Section | None:
    """The bytes that each GPU of a cluster sends, by mesh axis and by order of the axes; None for a TPU slice."""
    about = plan.get("mesh_axes")
    if not about:
        return None
    moved = [*numbers("a step", "sent inside nodes", "sent between nodes")]
    moved += [Column(_SECONDS, estimated=True)]
    tables = []
    for heading, key, rows in (
        ("axis", "axes", about["by_axis"]),
        ("order", "mesh", about["orders"]),
    ):
        cells = [
            [
                row[key] or units.DASH,
                f"{row['count']:,}",
                *(units.size(row[sent]) for sent in ("sent_inside", "sent_between")),
                units.duration(row["seconds"]),
            ]
            for row in rows
        ]
        if heading == "axis" or len(cells) > 1:
            tables.append(Table([*words(heading), *moved], cells))
    return Section("Mesh axes and nodes", tables, [about["advice"]], _ASIDE)


def compared(plans: Sequence[Plan]) -> Table:
    """A row for each plan; with the bubble if any plan has one, and with costs if any has a price."""
    bubbles = any(figures.bubble(plan) is not None for plan in plans)
    costs = any(get(plan, "time.price") for plan in plans)
    estimated = ["step", "steps/s", "tokens/s", "utilisation", "network"]
    days = ["days", "chip-days", "device-years"]
    columns = [
        *words("model", "step of", "topology"),
        *numbers("parameters", "memory of HBM", "fits"),
        *(Column(heading, estimated=True) for heading in estimated),
        *numbers(*["bubble"] * bubbles),
        *(Column(heading, estimated=True) for heading in days),
        *numbers("compile"),
        *[Column(heading, estimated=True) for heading in ("cost of a step", "cost in all")] * costs,
    ]
    rows = []
    for number, plan in enumerate(plans):
        budget = figures.budget(plan)
        keys = ("days", "chip_days", "device_years")
        rows.append(
            [
                PageCell(figures.name(plan), link=f"#plan-{number}"),
                plan.get("what") or units.DASH,
                *_compared(plan),
                *[units.share(figures.bubble(plan))] * bubbles,
                *(units.number(get(plan, f"time.{key}") if budget else None) for key in keys),
                units.duration(get(plan, "compile.compile_seconds")),
                *(figures.costs(plan) if costs else ()),
            ]
        )
    return Table(columns, rows)


def _compared(plan: Plan) -> list[str]:
    """The cells of a plan from its topology to the share of the network."""
    memory, step = plan["memory"], get(plan, "time.step_seconds")
    speed = units.number(figures.speed(plan))
    return [
        get(plan, "topology.name") or units.DASH,
        units.quantity(get(plan, "parameters.count")),
        f"{units.gib(figures.needed(plan))} / {units.gib(memory.get('hbm'))} GiB",
        "yes" if memory.get("fits") else f"no, by {units.size(memory.get('misses_by'))}",
        units.duration(step),
        units.number(1 / step if step else None),
        speed if figures.unit(plan) == "tokens" else f"{speed} {figures.unit(plan)}",
        units.share(get(plan, "time.utilization")),
        units.share(figures.collective_share(plan)),
    ]
