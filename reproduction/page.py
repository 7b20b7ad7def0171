"""Writes the page on reproduction from recorded plans and the paper's figures."""

from collections.abc import Callable, Mapping
from typing import Any

from . import gpus, models, paper, requests, scaling, text
from .goldens import COMPILE_TIME, MissingGoldens
from .measures import Plan
from .text import Section

Plans = Mapping[str, Plan]
Pictures = Callable[[], dict[str, bytes]]

_TITLES = {
    "table3": "tables 1 and 3",
    "figure2": "figure 2",
    "figure7": "figure 7",
    "figure8": "figure 8",
    "figure9": "figure 9",
    "decode": "decoding",
    **{generation: f"today's TPU {generation}" for generation in requests.GENERATIONS},
    "stages": "MoE(2048E, 36L) in stages",
    "state": "MoE(2048E, 60L) without copies",
    "cluster": "MoE(2048E, 36L) on 256 GPUs",
    **{card: f"{card.upper()} clusters" for card in requests.CARDS},
}
_KINDS = """\
- **measured**: by the paper, on its machine;
- **exact**: counted by us, or reported by the compiler for the program that the trainer runs;
- **timed**: by us, on the machine that compiled;
- **estimated**: from the compiled program's operations, traffic, cycles and collectives, and data sheets;
- **model**: from the interconnect model alone."""
_INTRODUCTION = f"""\
# Reproduction

This page compares the systems claims of [the paper]({paper.LINK}) ({paper.TITLE})
with the memory that its models need here and their estimated times. Nothing on this page ran on a TPU or a
GPU: programs are compiled, by the real compilers, without the machines. None of these models was
trained, so there are no translation scores.

{_KINDS}

This page is generated from plans in `docs/plans/` and the paper's figures in
`reproduction/paper.py`. A line that begins with **Differs** names a difference and its likely cause."""
_COMMANDS = """\
## Generating this page

```bash
make reproduction                   # this page and its pictures, from the recorded plans
make plans                          # makes every plan again and compares it: hours on two cores
python -m tools.reproduce --list    # the plans, and which of them are recorded
python -m tools.reproduce --plans --only=M4MoE2048E36L-v3_32x32
python -m tools.reproduce --plans --missing --update
```

If a plan differs from the recorded one, the command names the layer and the difference: collectives, arithmetic,
memory. `--update` records the new plan. `python -m benchmarks.compile_time` measures compile times; run it on an idle
machine."""


def write(
    plans: Plans, compiling: Mapping[str, Any] | None, partial: bool = False
) -> tuple[str, Pictures]:
    """Returns the page's Markdown, and functions that draw its pictures: SVG by file name.

    Args:
        plans: recorded ones by name.
        compiling: what benchmarks/compile_time.py recorded.
        partial: leave out sections whose plans are missing, and say so.

    Raises:
        MissingGoldens: some are, and not `partial`; or all are.
    """
    missing = _missing(plans, compiling)
    if missing and not partial:
        raise MissingGoldens(_tell(missing))
    groups = [group for group in requests.GROUPS if group not in missing]
    if not any(requests.GROUPS[group] for group in groups):
        raise MissingGoldens(_tell(missing))
    sections = _sections(groups, plans, compiling)
    parts = [_INTRODUCTION, *_left_out(missing), _summary(sections)]
    parts += [section.Markdown() for section in sections]
    body = "\n\n".join(part.strip("\n") for part in (*parts, _COMMANDS)) + "\n"
    return body, lambda: _pictures(groups, plans, compiling)


def _missing(plans: Plans, compiling: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """The plans that each group lacks."""
    missing = {
        group: [name for name in names if name not in plans]
        for group, names in requests.GROUPS.items()
    }
    for group in requests.PARTLY:
        if len(missing[group]) < len(requests.GROUPS[group]):
            missing[group] = []
    if compiling is None:
        missing["figure2"].append(COMPILE_TIME)
    return {group: names for group, names in missing.items() if names}


def _tell(missing: Mapping[str, list[str]]) -> str:
    lines = [f"{_TITLES[group]}: {', '.join(names)}" for group, names in missing.items()]
    if any(COMPILE_TIME in names for names in missing.values()):
        lines.append(f"{COMPILE_TIME} is made by `python -m benchmarks.compile_time`")
    lines.append(
        "the others by `python -m tools.reproduce --plans --missing --update`; "
        "--partial leaves out what they are for"
    )
    return "plans are missing in docs/plans:\n  " + "\n  ".join(lines)


def _left_out(missing: Mapping[str, list[str]]) -> list[str]:
    if not missing:
        return []
    left_out = text.listed([_TITLES[group] for group in missing])
    return [text.wrapped(f"**Not complete**: left out, as their plans are not made: {left_out}.")]


def _sections(groups: list[str], plans: Plans, compiling: Any) -> list[Section]:
    make: dict[str, Callable[[], list[Section]]] = {
        "table3": lambda: [
            models.parameters(plans),
            models.table3(plans),
            models.compiling(plans),
        ],
        "figure2": lambda: [scaling.figure2(plans, compiling)],
        "figure7": lambda: [scaling.figure7({n: plans[n] for n in requests.GROUPS["figure7"]})],
        "figure8": lambda: [scaling.figure8(plans)],
        "figure9": lambda: [scaling.figure9()],
        "decode": lambda: [models.decode(plans)],
    }
    sections = [section for group in groups if group in make for section in make[group]()]
    generations = [group for group in groups if group in requests.GENERATIONS]
    if generations:
        sections.append(models.today(plans, generations))
    cards = [group for group in groups if group in requests.CARDS]
    if cards:
        sections.append(gpus.section(plans, cards))
    return [models.machine(plans), *sections]


def _summary(sections: list[Section]) -> str:
    rows = [[f.claim, f.paper, f.ours, f.kind] for section in sections for f in section.findings]
    head = ["claim", "paper", "here", "ours is"]
    return "\n".join(["## In short", "", *text.table(head, rows)])


def _pictures(groups: list[str], plans: Plans, compiling: Any) -> dict[str, bytes]:
    from . import figures

    out = {}
    if "table3" in groups and (speeds := models.speeds(plans))[0]:
        out[models.SPEED] = figures.speed(*speeds)
    if "figure2" in groups:
        out[scaling.COMPILE] = figures.compile_time(compiling["entries"])
    if "figure7" in groups:
        out[scaling.MEMORY] = figures.memory(scaling.memory_bars(plans))
    if "figure8" in groups and scaling.has_ends(found := scaling.forward_plans(plans)):
        out[scaling.FORWARD] = figures.forward_time(found)
    if "figure9" in groups:
        out[scaling.COLLECTIVES] = figures.collectives(*scaling.figure9_lines())
    return out
