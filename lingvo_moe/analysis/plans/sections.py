"""Describes what reports show of a plan: each section once, for the terminal and for the page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lingvo_moe.analysis.plans import figures
from lingvo_moe.analysis.plans.figures import PHASES, PartTime, Plan, get
from lingvo_moe.core.console import units
from lingvo_moe.core.pages.tables import Column, PageCell, Piece, Section, Table, numbers, words
from lingvo_moe.core.pipeline.blocks import describe_padding

_SECONDS = "seconds"
_ASIDE = " (seconds estimated)"

# A column, and the cell that it has for a row of a plan.
_Shown = tuple[Column, Callable[[Any], str]]


def _table(rows: Iterable[Any], columns: Sequence[_Shown]) -> Table:
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return Table([column for column, _ in columns], cells)


def _word(heading: str, key: str, wide: bool = False) -> _Shown:
    return Column(heading, numeric=False, wide=wide), lambda row: row[key] or units.DASH


def _count(heading: str, key: str, wide: bool = False) -> _Shown:
    return Column(heading, wide=wide), lambda row: f"{row[key]:,}"


def _bytes(heading: str, key: str) -> _Shown:
    return Column(heading), lambda row: units.size(row[key])


def _seconds(heading: str, key: str) -> _Shown:
    return Column(heading, estimated=True), lambda row: units.duration(row.get(key))


_PLACE = [_word("layer", "layer"), _word("part", "part", wide=True), _word("phase", "phase")]


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
    columns = [
        (words("what")[0], lambda row: PageCell(figures.KINDS[row["kind"]], row["kind"])),
        *(_word(key, key) for key in ("layer", "part", "phase")),
        _bytes("bytes", "bytes"),
    ]
    table = _table(buffers[:most], columns)
    if rest := buffers[most:]:
        size = units.size(sum(row["bytes"] for row in rest))
        table = replace(table, rows=[*table.rows, [f"{len(rest)} more", "", "", "", size]])
    aside = " (traced through the compiled schedule)"
    return Section("What is live at the peak", [table], aside=aside)


def state(plan: Plan) -> Section | None:
    """The parts of the training state, and what a device would hold with other levels of train.shard_state."""
    of_step = plan.get("state")
    if not of_step:
        return None
    columns = [
        *(_word(*names) for names in (("part", "part"), ("type", "dtype"), ("memory", "memory"))),
        *(_bytes(*names) for names in (("in all", "bytes_total"), ("of a device", "bytes"))),
        (Column("copies"), lambda row: f"{row['copies']:,.4g}"),
    ]
    sizes = {row["shard_state"]: units.size(row["bytes"]) for row in of_step["levels"]}
    planned = sizes.pop(of_step["shard_state"])
    others = ", ".join(f"{size} with {level}" for level, size in sizes.items())
    notes = [f"train.shard_state={of_step['shard_state']} holds {planned}; {others}."]
    if offloads := of_step.get("offloads"):
        others = ", ".join(f"{units.size(row['bytes'])} with {row['offload']}" for row in offloads)
        notes.append(f"With train.offload a device holds {others}.")
    return Section("Training state", [_table(of_step["parts"], columns)], notes)


def hosts(plan: Plan, most: int | None = None) -> Section | None:
    """The moves from and to the hosts' memory, the longest first, and the memory that a host needs."""
    host = plan.get("host")
    if not host:
        return None
    columns = [_word("move", "direction"), *_PLACE, _count("a step", "count")]
    columns += [_bytes("bytes of one", "bytes"), _seconds(_SECONDS, "seconds")]
    columns.append(_seconds("waiting", "waiting_seconds"))
    table = _table(host["moves"], columns).First(most)
    return Section("Memory of the hosts", [table], _of_hosts(host), _ASIDE)


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
    spanned = Column("slices" if get(plan, "topology.slices") else "nodes"), figures.spans
    columns = [_word("kind", "kind"), *_PLACE, *[spanned] * located, _count("a step", "count")]
    columns += [_bytes("bytes of one", "bytes"), _count("devices", "participants", wide=True)]
    table = _table(items[:most], [*columns, _seconds(_SECONDS, "seconds")])
    rows = list(table.rows)

    def summed(what: str, some: Sequence[Mapping[str, Any]]) -> list[str]:
        count = sum(item["count"] for item in some)
        seconds = units.duration(sum(item.get("seconds") or 0.0 for item in some))
        return [what, *[""] * (3 + located), f"{count:,}", "", "", seconds]

    if most is not None and (rest := items[most:]):
        rows.append(summed(f"{len(rest)} more", rest))
    return Table(table.columns, rows, summed("in all", items))


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
    columns = [
        *(_word("kind", "kind"), *_PLACE, _count("a step", "count")),
        (Column("sent by one", wide=True), lambda row: units.size(row["sent_between"])),
        (Column("sent a step"), lambda row: units.size(row["count"] * row["sent_between"])),
        _seconds(_SECONDS, "seconds"),
    ]
    sent = units.size(sum(item["count"] * item["sent_between"] for item in items))
    seconds = sum(item["seconds"] for item in items)
    note = (
        f"In all {sum(item['count'] for item in items):,} a step: each device sends {sent} to other slices in "
        f"{units.duration(seconds)}, {units.share(seconds / plan['time']['step_seconds'])} of the step. The rate is "
        "the data sheet's, not measured."
    )
    return Section(title, [_table(items, columns).First(most)], [note], _ASIDE)


def mesh_axes(plan: Plan) -> Section | None:
    """The bytes that each GPU of a cluster sends, by mesh axis and by order of the axes; None for a TPU slice."""
    about = plan.get("mesh_axes")
    if not about:
        return None
    moved = [
        *(_count("a step", "count"), _bytes("sent inside nodes", "sent_inside")),
        *(_bytes("sent between nodes", "sent_between"), _seconds(_SECONDS, "seconds")),
    ]
    tables = [_table(about["by_axis"], [_word("axis", "axes"), *moved])]
    if len(about["orders"]) > 1:
        tables.append(_table(about["orders"], [_word("order", "mesh"), *moved]))
    return Section("Mesh axes and nodes", tables, [about["advice"]], _ASIDE)


def compared(plans: Sequence[Plan]) -> Table:
    """A row for each plan; with the bubble if any plan has one, and with costs if any has a price."""
    bubbles = any(figures.bubble(plan) is not None for plan in plans)
    costs = any(get(plan, "time.price") for plan in plans)

    def of_budget(path: str) -> Callable[[Plan], str]:
        return lambda plan: units.number(get(plan, path) if figures.budget(plan) else None)

    columns: list[_Shown] = [
        (words("model")[0], figures.name),
        (words("step of")[0], lambda plan: plan.get("what") or units.DASH),
        (words("topology")[0], lambda plan: get(plan, "topology.name") or units.DASH),
        (Column("parameters"), lambda plan: units.quantity(get(plan, "parameters.count"))),
        (Column("memory of HBM"), _of_hbm),
        (Column("fits"), _fits),
        (_estimated("step"), lambda plan: units.duration(get(plan, "time.step_seconds"))),
        (_estimated("steps/s"), lambda plan: units.number(_rate(plan))),
        (_estimated("tokens/s"), _speed),
        (_estimated("utilisation"), lambda plan: units.share(get(plan, "time.utilization"))),
        (_estimated("network"), lambda plan: units.share(figures.collective_share(plan))),
        *[(Column("bubble"), lambda plan: units.share(figures.bubble(plan)))] * bubbles,
        (_estimated("days"), of_budget("time.days")),
        (_estimated("chip-days"), of_budget("time.chip_days")),
        (_estimated("device-years"), of_budget("time.device_years")),
        (Column("compile"), lambda plan: units.duration(get(plan, "compile.compile_seconds"))),
        *[(_estimated("cost of a step"), lambda plan: figures.costs(plan)[0])] * costs,
        *[(_estimated("cost in all"), lambda plan: figures.costs(plan)[1])] * costs,
    ]
    table = _table(plans, columns)
    rows = [
        [PageCell(row[0], link=f"#plan-{number}"), *row[1:]]
        for number, row in enumerate(table.rows)
    ]
    return Table(table.columns, rows)


def _estimated(heading: str) -> Column:
    return Column(heading, estimated=True)


def _of_hbm(plan: Plan) -> str:
    return f"{units.gib(figures.needed(plan))} / {units.gib(plan['memory'].get('hbm'))} GiB"


def _fits(plan: Plan) -> str:
    memory = plan["memory"]
    return "yes" if memory.get("fits") else f"no, by {units.size(memory.get('misses_by'))}"


def _rate(plan: Plan) -> float | None:
    step = get(plan, "time.step_seconds")
    return 1 / step if step else None


def _speed(plan: Plan) -> str:
    speed, unit = units.number(figures.speed(plan)), figures.unit(plan)
    return speed if unit == "tokens" else f"{speed} {unit}"
