"""Draws the figures of a run's page: training curves and the comparison with bilingual models."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lingvo_moe.core.pages.drawing import FIRST, FOURTH, RULE, SECOND, SOFT, THIRD, styled
from lingvo_moe.tasks.mt.reports.language_names import english_name

_MOST_POINTS = 1000
_MOST_NAMES = 45
_GROUP_COLOURS = (("high", FIRST), ("mid", THIRD), ("low", FOURTH))


@styled
def losses(rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]] = ()) -> Figure:
    """The training loss and the negative log-likelihood in it, by step; and that of held-out data, the best marked."""
    figure, axes = plt.subplots(figsize=(4.4, 2.7))
    for name, label, colour in (
        ("loss", "loss", FIRST),
        ("nll", "negative log-likelihood", SECOND),
    ):
        axes.plot(*_curve(rows, name), label=label, color=colour)
    if held_out:
        steps, values = _curve(held_out, "nll")
        axes.plot(steps, values, label="the same, held-out", color=FOURTH)
        best = min(zip(values, steps), default=None)
        if best:
            axes.plot(best[1], best[0], marker="o", markersize=4, color=FOURTH)
    axes.set(xlabel="step", ylabel="nats a token")
    axes.legend()
    return figure


@styled
def scores(rows: Sequence[Mapping[str, Any]], name: str, label: str) -> Figure:
    """A score by step: the mean of all languages, and of each resource group."""
    figure, axes = plt.subplots(figsize=(4.4, 2.7))
    groups = [(f"groups/{group}/{name}", group, colour) for group, colour in _GROUP_COLOURS]
    for key, shown, colour in ((name, "all languages", SECOND), *groups):
        steps, values = _curve(rows, key)
        if steps:
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, values, label=shown, color=colour, marker=marker, markersize=4)
    axes.set(xlabel="step", ylabel=label, ylim=(0, None))
    axes.legend()
    return figure


@styled
def learning_rates(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The learning rate, by step."""
    figure, axes = plt.subplots(figsize=(4.4, 2.7))
    axes.plot(*_curve(rows, "learning_rate"), color=FIRST)
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    return figure


@styled
def deltas(curve: Mapping[str, Any]) -> Figure:
    """Delta BLEU by language, most training pairs first, and its mean over a sliding window (figure 6)."""
    figure, axes = plt.subplots(figsize=(5.6, 3.2))
    places = range(len(curve["languages"]))
    axes.bar(places, curve["delta_bleu"], color=RULE, width=0.8, label="each language")
    label = f"mean of {curve['window']} neighbours"
    marker = "o" if len(places) < 3 else None
    axes.plot(places, curve["smoothed"], color=FIRST, label=label, marker=marker, markersize=4)
    axes.axhline(0.0, color=SOFT, linewidth=0.8)
    axes.set(ylabel="delta BLEU", xlabel="languages, from most training pairs to fewest")
    few = len(places) <= _MOST_NAMES
    names = [english_name(code) or code for code in curve["languages"]]
    axes.set_xticks(list(places) if few else [], names if few else [], rotation=90)
    axes.grid(axis="x", visible=False)
    axes.legend()
    return figure


def _curve(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values, subsampled if there are more than a reader can see."""
    every = -(-len(rows) // _MOST_POINTS)
    kept = [row for row in [*rows[:-1:every], rows[-1]] if row.get(name) is not None]
    return [row["step"] for row in kept], [row[name] for row in kept]
