"""Draws the pictures of pages of the docs as SVG: the same plans give the same bytes."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from lingvo_moe.core.pages import drawing
from lingvo_moe.core.pages.drawing import FIRST, INK, SECOND, SOFT, Figure, plt

from . import measures
from .measures import Plan

# Told apart with any colour vision, and on paper: the neighbours of a stack differ in lightness.
_COLOURS = ("#1f4e79", "#5b9bd5", "#2a9d8f", "#e9c46a", "#f4a261", "#c8553d", "#b5bac1")
_GIB = 2**30


def _new(width: float, height: float, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    figure, axes = plt.subplots(1, columns, squeeze=False, sharey=True, figsize=(width, height))
    for one in axes[0]:
        one.grid(axis="x", visible=False)
    return figure, axes[0]


def _stack(axes: Axes, names: Sequence[str], heights: Mapping[str, Sequence[float]]) -> list[float]:
    """Draws a bar for each name, stacked of these labelled heights; returns how high the bars are."""
    tops = [0.0] * len(names)
    for (label, bars), colour in zip(heights.items(), _COLOURS):
        axes.bar(names, bars, width=0.6, bottom=tops, color=colour, label=label)
        tops = [top + height for top, height in zip(tops, bars)]
    return tops


def _above(axes: Axes, name: str, height: float, text: str) -> None:
    axes.annotate(
        text, (name, height), (0, 2), textcoords="offset points", ha="center", va="bottom"
    )


@drawing.picture
def compile_time(entries: Sequence[Mapping[str, float]]) -> Figure:
    """Seconds to lower and to compile by the number of devices."""
    figure, (axes,) = _new(6.2, 3.0)
    keys = {"compiling": "compile_seconds", "tracing and lowering": "lower_seconds"}
    heights = {label: [e[key] for e in entries] for label, key in keys.items()}
    tops = _stack(axes, [f"{e['devices']:,}" for e in entries], heights)
    axes.set(xlabel="devices, and experts", ylabel="seconds", ylim=(0, 1.25 * max(tops)))
    axes.legend(loc="upper center", ncols=2)
    return figure


@drawing.picture
def memory(bars: Mapping[str, Mapping[str, Plan]]) -> Figure:
    """Bytes on a core by kind."""
    figure, panels = _new(8.4, 3.6, len(bars))
    plans = [plan for panel in bars.values() for plan in panel.values()]
    limit = plans[0]["memory"]["hbm"] / _GIB
    for axes, (title, panel) in zip(panels, bars.items()):
        size = {label: measures.needed(plan) / _GIB for label, plan in panel.items()}
        kinds = [
            measures.memory_kinds(plan) if measures.fits(plan) else {} for plan in panel.values()
        ]
        heights = {
            name: [one.get(key, 0.0) / _GIB for one in kinds]
            for key, name in measures.MEMORY.items()
        }
        tops = _stack(axes, list(panel), heights)
        for (label, plan), top in zip(panel.items(), tops):
            if not top:  # only the sum is known
                axes.bar([label], [size[label]], 0.6, color="white", edgecolor=SOFT, hatch="///")
            said = "" if measures.fits(plan) else "\ndoes not fit"
            _above(axes, label, max(size[label], top), f"{size[label]:.1f}{said}")
        axes.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(title=title, xlabel="experts")
    at = {"xycoords": ("axes fraction", "data"), "va": "bottom"}
    panels[0].annotate("memory of a core", (0.02, limit), **at)
    top = max(*(measures.needed(plan) / _GIB for plan in plans), limit)
    panels[0].set(ylabel="GiB on a core", ylim=(0, 1.12 * top))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@drawing.picture
def forward_time(plans: Mapping[int, Plan]) -> Figure:
    """Milliseconds of a forward pass by part, a bar for each number of experts."""
    figure, (axes,) = _new(6.6, 3.6)
    names = [f"{experts:,} experts" for experts in plans]
    seconds = [measures.forward_seconds(plan) for plan in plans.values()]
    heights = {name: [1e3 * one[key] for one in seconds] for key, name in measures.FORWARD.items()}
    tops = _stack(axes, names, heights)
    for name, total in zip(names, tops):
        _above(axes, name, total, f"{total:.0f} ms")
    axes.set(ylabel="ms, estimated", ylim=(0, 1.1 * max(tops)))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    return figure


@drawing.picture
def collectives(devices: Sequence[int], lines: Mapping[tuple[str, int], Sequence[float]]) -> Figure:
    """Microseconds of a collective by devices, both axes logarithmic."""
    figure, (axes,) = _new(6.2, 3.4)
    colours = {"all-reduce": FIRST, "all-to-all": SECOND}
    sizes = sorted({size for _, size in lines})
    for (kind, size), seconds in lines.items():
        axes.plot(
            devices,
            [1e6 * s for s in seconds],
            color=colours[kind],
            marker="os"[sizes.index(size)],
            linestyle=("-", (0, (4, 2)))[sizes.index(size)],
            label=f"{kind}, {size / 1e6:.0f} MB",
        )
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="µs, from the model")
    axes.set_xticks(devices, [f"{d:,}" for d in devices])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis="both")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return figure


@drawing.picture
def speed(labels: Sequence[str], measured: Sequence[float], ours: Sequence[float]) -> Figure:
    """Steps a second of the paper and estimated, a pair of bars for each model."""
    figure, (axes,) = _new(7.2, 3.0)
    places = range(len(labels))
    axes.bar([x - 0.2 for x in places], measured, width=0.4, color=SOFT, label="paper, measured")
    axes.bar([x + 0.2 for x in places], ours, width=0.4, color=FIRST, label="here, estimated")
    axes.set_xticks(list(places), [label.replace(", ", ",\n") for label in labels])
    axes.set(ylabel="steps a second")
    axes.legend()
    return figure


@drawing.picture
def loss_by_experts(points: Sequence[tuple[int, float, int]]) -> Figure:
    """Held-out loss by the number of experts."""
    figure, (axes,) = _new(5.4, 3.2)
    experts = [number for number, _, _ in points]
    axes.plot(experts, [nll for _, nll, _ in points], marker="o", color=FIRST)
    for number, nll, params in points:
        label = f"{params / 1e6:.1f}M"
        axes.annotate(label, (number, nll), (4, 5), textcoords="offset points")
    axes.set(xscale="log", xlabel="experts (1: dense)", ylabel="held-out loss, nats a token")
    axes.set_xticks(experts, [str(number) for number in experts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.15)
    return figure


@drawing.picture
def loss_by_router(bars: Sequence[tuple[str, float]]) -> Figure:
    """Held-out loss of each router, (what it is, nats a token), the lowest on top."""
    figure, (axes,) = _new(7.2, 0.5 + 0.3 * len(bars))
    ordered = sorted(bars, key=lambda bar: -bar[1])
    axes.barh([says for says, _ in ordered], [nll for _, nll in ordered], color=FIRST)
    axes.bar_label(axes.containers[0], fmt="%.3f", padding=3)
    low, high = ordered[-1][1], ordered[0][1]
    margin = max(high - low, 0.02)
    axes.set(xlim=(low - 0.6 * margin, high + 0.3 * margin))
    axes.set(xlabel="held-out loss, nats a token (the axis does not begin at 0)")
    axes.grid(visible=False)
    return figure
