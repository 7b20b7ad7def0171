"""Draws the figures of a run's page: training curves and the comparison with bilingual models."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lingvo_moe.core.pages.drawing import FIRST, RULE, SECOND, SOFT, styled
from lingvo_moe.tasks.mt.reports.language_names import english_name

_MOST_POINTS = 1000
_MOST_NAMES = 45


@styled
def losses(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The training loss and the negative log-likelihood in it, by step."""
    figure, axes = plt.subplots(figsize=(4.4, 2.7))
    for name, label, colour in (
        ("loss", "loss", FIRST),
        ("nll", "negative log-likelihood", SECOND),
    ):
        axes.plot(*_curve(rows, name), label=label, color=colour)
    axes.set(xlabel="step", ylabel="nats a token")
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
    """Delta BLEU by language, most training pairs first, and its mean over a sliding window (figure 6).

    Args:
        curve: of `baselines.delta_curve`, with one language at least.
    """
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
    kept = [row for row in [*rows[::every], rows[-1]] if row.get(name) is not None]
    return [row["step"] for row in kept], [row[name] for row in kept]
