"""Writes the page about a run: one HTML file without scripts or external files."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lingvo_moe.core.console.command import as_typed
from lingvo_moe.core.pages import drawing, rendering
from lingvo_moe.core.pages.drawing import FIRST, FOURTH, RULE, SECOND, SOFT, THIRD, styled
from lingvo_moe.tasks.mt.quality import intervals
from lingvo_moe.tasks.mt.quality.baselines import delta_curve
from lingvo_moe.tasks.mt.reports import routing_page, score_tables
from lingvo_moe.tasks.mt.reports.language_names import english_name, name_and_code
from lingvo_moe.tasks.mt.reports.run_report import Missing, RunReport

_MOST_POINTS = 1000
_MOST_NAMES = 45
_GROUP_COLOURS = (("high", FIRST), ("mid", THIRD), ("low", FOURTH))


def html_report(report: RunReport) -> str:
    """The whole page."""
    scores, routing = report.scores, report.routing
    return rendering.html(
        __package__,
        "run.html",
        report=report,
        headline=_headline(report),
        groups=None if isinstance(scores, Missing) else score_tables.by_group(scores),
        languages=None if isinstance(scores, Missing) else score_tables.by_language(scores),
        footnote=intervals.footnote(),
        against=scores if isinstance(scores, Missing) else _against(scores),
        curves=_curves(report),
        routing="" if isinstance(routing, Missing) else routing_page.section(routing),
        as_typed=as_typed,
        name_and_code=name_and_code,
    )


def _headline(report: RunReport) -> list[tuple[str, str, str]]:
    out = [("parameters", f"{report.parameters:,}", ""), ("steps", f"{report.steps:,}", "")]
    if not isinstance(report.metrics, Missing):
        last = report.metrics[-1]
        out.append(
            ("last loss", f"{last['loss']:.2f}" if last.get("loss") else "-", "nats a token")
        )
    if not isinstance(report.scores, Missing):
        mean = report.scores["average"]
        below = f"mean of {mean['languages']} languages"
        for kind, name in (("bleu", "BLEU"), ("chrf", "chrF")):
            margin = mean.get(f"{kind}_margin")
            sure = "" if margin is None else f"± {margin:.1f}, "
            out.append((name, f"{mean[kind]:.1f}", sure + below))
        if "delta_bleu" in mean:
            below = f"over {mean['baselines']} bilingual models"
            out.append(("delta BLEU", f"{mean['delta_bleu']:+.1f}", below))
    return out


def _against(scores: dict[str, Any]) -> Missing | dict[str, Any]:
    """The comparison with bilingual models: a picture and the window of its mean; or why there is none."""
    curve = delta_curve(scores)
    if not curve["languages"]:
        run = (scores.get("model") or {}).get("logdir", "RUN")
        return Missing(
            "no bilingual models were scored (docs/quality.md)",
            f"python -m tools.evaluate --logdir={run} --baselines=BILINGUAL --rescore",
        )
    alt = f"delta BLEU of {len(curve['languages'])} languages, by training pairs"
    picture = drawing.svg(styled(draw_deltas)(curve), alt)
    return {"picture": picture, "window": curve["window"]}


def _curves(report: RunReport) -> list[str]:
    """The pictures of training; none where no metrics are there."""
    if isinstance(report.metrics, Missing):
        return []
    pictures = [(_draw_losses(report.metrics, report.held_out), "loss")]
    if report.metrics[-1].get("learning_rate") is not None:
        pictures.append((_draw_learning_rates(report.metrics), "learning rate"))
    if report.scored:
        for name, label in (("bleu", "BLEU"), ("chrf", "chrF")):
            pictures.append((_draw_scores(report.scored, name, label), label))
    return [drawing.svg(figure, f"{what} by step") for figure, what in pictures]


@styled
def _draw_losses(
    rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]] = ()
) -> Figure:
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
def _draw_scores(rows: Sequence[Mapping[str, Any]], name: str, label: str) -> Figure:
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
def _draw_learning_rates(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The learning rate, by step."""
    figure, axes = plt.subplots(figsize=(4.4, 2.7))
    axes.plot(*_curve(rows, "learning_rate"), color=FIRST)
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    return figure


def draw_deltas(curve: Mapping[str, Any]) -> Figure:
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
    shown = [row for row in [*rows[:-1:every], rows[-1]] if row.get(name) is not None]
    return [row["step"] for row in shown], [row[name] for row in shown]
