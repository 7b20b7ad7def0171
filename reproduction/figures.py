"""Draws the page's pictures as SVG: the same plans give the same bytes."""

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from lingvo_moe.core.planner import figures as plan_figures

from . import measures
from .measures import Plan

_INK, _GRID, _PAPER = "#24292f", "#d8dee4", "#6e7781"
# Told apart with any colour vision, and on paper: the neighbours of a stack differ in lightness.
_COLOURS = ("#1f4e79", "#5b9bd5", "#2a9d8f", "#e9c46a", "#f4a261", "#c8553d", "#b5bac1")
_STYLE = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": _GRID,
    "legend.frameon": False,
    "svg.hashsalt": "lingvo_moe",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_GIB = 2**30


def _styled(draw: Callable[..., bytes]) -> Callable[..., bytes]:
    """Decorator: draws and saves in the page's style, and leaves others' as it was."""

    @functools.wraps(draw)
    def styled(*args: Any) -> bytes:
        with plt.rc_context(_STYLE):
            return draw(*args)

    return styled


def _new(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    figure, axes = plt.subplots(
        1, columns, squeeze=False, sharey=True, figsize=(width, height), layout="constrained"
    )
    for one in axes[0]:
        one.grid(axis="y", linewidth=0.8)
        one.set_axisbelow(True)
    return figure, axes[0]


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return buffer.getvalue()


@_styled
def compile_time(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Seconds to lower and to compile by the number of devices."""
    figure, (axes,) = _new(6.2, 3.0)
    names = [f"{e['devices']:,}" for e in entries]
    lower = [e["lower_seconds"] for e in entries]
    compiling = [e["compile_seconds"] for e in entries]
    axes.bar(names, lower, width=0.6, color=_COLOURS[1], label="tracing and lowering")
    axes.bar(names, compiling, width=0.6, bottom=lower, color=_COLOURS[0], label="compiling")
    axes.set(xlabel="devices, and experts", ylabel="seconds")
    axes.set_ylim(0, 1.25 * max(a + b for a, b in zip(lower, compiling)))
    axes.legend(loc="upper center", ncols=2)
    return _svg(figure)


@_styled
def memory(bars: Mapping[str, Mapping[str, Plan]]) -> bytes:
    """Bytes on a core by kind.

    Args:
        bars: by the title of a panel, by the label below a bar: its plan.
    """
    figure, panels = _new(8.4, 3.6, len(bars))
    plans = [plan for panel in bars.values() for plan in panel.values()]
    limit = plans[0]["memory"]["hbm"] / _GIB
    for axes, (title, panel) in zip(panels, bars.items()):
        for label, plan in panel.items():
            _memory_bar(axes, label, plan)
        axes.axhline(limit, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_title(title)
        axes.set_xlabel("experts")
    panels[0].set_ylabel("GiB on a core")
    panels[0].annotate(
        "memory of a core",
        (0.02, limit),
        xycoords=("axes fraction", "data"),
        va="bottom",
        fontsize=8,
    )
    top = max(plan_figures.needed(plan) for plan in plans) / _GIB
    panels[0].set_ylim(0, 1.12 * max(top, limit))
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS]
    names = list(measures.MEMORY.values())
    figure.legend(handles[: len(names)], names, loc="outside lower center", ncols=3)
    return _svg(figure)


def _memory_bar(axes: Any, label: str, plan: Plan) -> None:
    kinds = measures.memory_kinds(plan)
    held = plan_figures.needed(plan) / _GIB
    if not kinds or not measures.fits(plan):
        axes.bar([label], [held], width=0.6, color="white", edgecolor=_PAPER, hatch="///")
    bottom = 0.0
    if measures.fits(plan):
        for value, colour in zip(kinds.values(), _COLOURS):
            axes.bar([label], [value / _GIB], width=0.6, bottom=bottom, color=colour)
            bottom += value / _GIB
    text = f"{held:.1f}" if measures.fits(plan) else f"{held:.1f}\ndoes not fit"
    axes.annotate(
        text,
        (label, max(held, bottom)),
        ha="center",
        va="bottom",
        fontsize=8,
        xytext=(0, 2),
        textcoords="offset points",
    )


@_styled
def forward_time(plans: Mapping[int, Plan]) -> bytes:
    """Milliseconds of a forward pass by part, a bar for each number of experts."""
    figure, (axes,) = _new(6.6, 3.6)
    bottoms = dict.fromkeys(plans, 0.0)
    for (key, name), colour in zip(measures.FORWARD.items(), _COLOURS):
        heights = [1e3 * measures.forward_seconds(plan)[key] for plan in plans.values()]
        axes.bar(
            [f"{experts:,} experts" for experts in plans],
            heights,
            width=0.55,
            bottom=list(bottoms.values()),
            color=colour,
            label=name,
        )
        bottoms = {e: bottoms[e] + h for e, h in zip(plans, heights)}
    for i, total in enumerate(bottoms.values()):
        axes.annotate(
            f"{total:.0f} ms",
            (i, total),
            ha="center",
            va="bottom",
            xytext=(0, 2),
            textcoords="offset points",
        )
    axes.set_ylabel("ms, estimated")
    axes.set_ylim(0, 1.1 * max(bottoms.values()))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    return _svg(figure)


@_styled
def collectives(devices: Sequence[int], lines: Mapping[tuple[str, int], Sequence[float]]) -> bytes:
    """Microseconds of a collective by devices, both axes logarithmic.

    Args:
        devices: of each slice.
        lines: seconds on each, by (kind, bytes on each device).
    """
    figure, (axes,) = _new(6.2, 3.4)
    colours = {"all-reduce": _COLOURS[0], "all-to-all": _COLOURS[5]}
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
    axes.grid(axis="both", linewidth=0.8)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    return _svg(figure)


@_styled
def speed(labels: Sequence[str], measured: Sequence[float], ours: Sequence[float]) -> bytes:
    """Steps a second of the paper and estimated, a pair of bars for each model."""
    figure, (axes,) = _new(7.2, 3.0)
    places = range(len(labels))
    axes.bar([x - 0.2 for x in places], measured, width=0.4, color=_PAPER, label="paper, measured")
    axes.bar([x + 0.2 for x in places], ours, width=0.4, color=_COLOURS[1], label="here, estimated")
    axes.set_xticks(list(places), [label.replace(", ", ",\n") for label in labels])
    axes.set_ylabel("steps a second")
    axes.legend()
    return _svg(figure)


@_styled
def loss_by_experts(points: Sequence[tuple[int, float, int]]) -> bytes:
    """Held-out loss by the number of experts.

    Args:
        points: (experts, nats a token, parameters), fewest experts first.
    """
    figure, (axes,) = _new(5.4, 3.2)
    experts = [number for number, _, _ in points]
    axes.plot(experts, [nll for _, nll, _ in points], marker="o", color=_COLOURS[0])
    for number, nll, params in points:
        label = f"{params / 1e6:.1f}M"
        axes.annotate(label, (number, nll), (4, 5), textcoords="offset points")
    axes.set(xscale="log", xlabel="experts (1: dense)", ylabel="held-out loss, nats a token")
    axes.set_xticks(experts, [str(number) for number in experts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.15)
    return _svg(figure)


@_styled
def loss_by_router(bars: Sequence[tuple[str, float]]) -> bytes:
    """Held-out loss of each router, (what it is, nats a token), the lowest on top."""
    figure, (axes,) = _new(7.2, 0.5 + 0.3 * len(bars))
    ordered = sorted(bars, key=lambda bar: -bar[1])
    axes.barh([says for says, _ in ordered], [nll for _, nll in ordered], color=_COLOURS[1])
    axes.bar_label(axes.containers[0], fmt=" %.3f")
    low, high = ordered[-1][1], ordered[0][1]
    margin = max(high - low, 0.02)
    axes.set_xlim(low - 0.6 * margin, high + 0.3 * margin)
    axes.set(xlabel="held-out loss, nats a token (the axis does not begin at 0)")
    axes.grid(visible=False)
    return _svg(figure)
