"""Writes a RoutingReport as part of a page: a table of the MoE layers, and a drawing of languages by experts.

Letters: U language, E expert.
"""

import math
from collections.abc import Mapping

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

from lingvo_moe.core.pages import drawing, rendering
from lingvo_moe.core.pages.tables import Column, Table, numbers, words
from lingvo_moe.tasks.mt.reports.language_names import name_and_code
from lingvo_moe.tasks.mt.reports.routing import LayerRouting, RoutingReport

_LARGEST_INCHES = 40.0


# An even share is transparent, so that the page's colour, light or dark, is in the middle.
_COLOURS = LinearSegmentedColormap.from_list(
    "share",
    [
        (0.0, drawing.FIRST + "ff"),
        (0.5, drawing.FIRST + "00"),
        (0.5, drawing.SECOND + "00"),
        (1.0, drawing.SECOND + "ff"),
    ],
)


def section(report: RoutingReport) -> str:
    """A table of the layers, then a drawing of each, as HTML."""
    drawings = [
        (
            layer.name,
            drawing.svg(plot_layer(layer, report), f"languages by experts in {layer.name}"),
        )
        for layer in report.layers
    ]
    values = {"report": report, "layers": table_of(report), "drawings": drawings}
    return rendering.html(__package__, "routing.html", **values)


def table_of(report: RoutingReport) -> Table:
    """A row for each layer; headings have two lines."""
    experts, languages = report.about["num_experts"], len(report.pairs)
    columns = [
        *words("MoE\nlayer"),
        Column("\nrouter", numeric=False, wide=True),
        *numbers("experts\na token", "busiest\nexpert", "dead\nones"),
        Column(f"gate entropy\n(most {math.log(experts):.2f})"),
        Column(f"language, bits\n(most {math.log2(min(experts, languages)):.2f})"),
        *numbers("dropped\n%", "capacity\nfactor"),
    ]
    return Table(columns, [_row(layer) for layer in report.layers])


def _row(layer: LayerRouting) -> list[str]:
    capacity = layer.training.get("effective_capacity")
    return [
        layer.name,
        layer.router.removesuffix("Router"),
        f"{layer.chosen_UE.sum() / layer.tokens_U.sum():.2f}",
        f"{layer.load_E.max() * len(layer.load_E):.2f} x",
        str(layer.dead_experts),
        "-" if layer.gate_entropy is None else f"{layer.gate_entropy:.2f}",
        f"{layer.language_bits:.2f}",
        _dropped(layer.training),
        "-" if capacity is None else f"{capacity:.2f}",
    ]


def _dropped(training: Mapping[str, float]) -> str:
    """'1.2 + 8.0', percents by rank; '-' where nothing is known."""
    ranks: list[float] = []
    while (name := f"over_capacity_{len(ranks) + 1}_ratio") in training:
        ranks.append(training[name])
    if not ranks and "over_capacity_ratio" in training:
        ranks = [training["over_capacity_ratio"]]
    return " + ".join(f"{100 * share:.1f}" for share in ranks) or "-"


@drawing.styled
def plot_layer(layer: LayerRouting, report: RoutingReport) -> plt.Figure:
    """Plots each expert's share of all tokens, and below it of each language's tokens; 1 is an even share."""
    parts = _parts(layer)
    experts, languages = layer.chosen_UE.shape[1], len(report.pairs)
    width = min(max(4.0, 0.2 * experts), 9.0) * len(parts) + 1.0
    height = min(1.6 + max(1.2, 0.16 * languages), _LARGEST_INCHES)
    figure, all_axes = plt.subplots(
        2,
        len(parts),
        squeeze=False,
        sharex="col",
        figsize=(width, height),
        height_ratios=[1.2, height - 1.6],
    )
    shares = {name: _shares(x_UE) * experts for name, x_UE in parts.items()}
    most = max(2.0, *(float(x_UE.max()) for x_UE in shares.values()))
    even_is_clear = TwoSlopeNorm(1.0, 0.0, most)
    image = None
    for axes, (name, x_UE) in zip(all_axes.T, parts.items(), strict=True):
        load_E = x_UE.sum(0) / x_UE.sum() * experts
        axes[0].bar(
            range(experts), load_E, width=0.8 if experts <= 128 else 1.0, color=drawing.FIRST
        )
        axes[0].axhline(1.0, color=drawing.SOFT, linewidth=0.8)
        axes[0].grid(visible=False)
        axes[0].set(title=name, ylabel="load")
        image = axes[1].imshow(
            shares[name], aspect="auto", norm=even_is_clear, cmap=_COLOURS, interpolation="nearest"
        )
        axes[1].grid(visible=False)
        axes[1].set(xlabel="expert", yticks=[])
    names = [name_and_code(language) for language in report.languages]
    all_axes[1, 0].set_yticks(range(languages), names, fontsize=7)
    bar = figure.colorbar(
        image,
        ax=all_axes[1],
        label="times an even share",
        shrink=min(1.0, 3.0 / height),
        anchor=(0.0, 1.0),
    )
    bar.ax.set_yscale("linear")
    return figure


def _parts(layer: LayerRouting) -> dict[str, np.ndarray]:
    """The matrices [U,E] that are drawn side by side, by title."""
    if layer.first_UE is not None:
        return {"first choices": layer.first_UE, "all choices": layer.chosen_UE}
    if layer.probability_UE is not None:
        return {"tokens sent": layer.chosen_UE, "probability": layer.probability_UE}
    return {"tokens sent": layer.chosen_UE}


def _shares(x_UE: np.ndarray) -> np.ndarray:
    """The share of each expert in each language's tokens."""
    return x_UE / np.maximum(x_UE.sum(1, keepdims=True), 1e-9)
