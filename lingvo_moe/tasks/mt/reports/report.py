"""Writes the page about a run: one HTML file without scripts or external files."""

from typing import Any

from lingvo_moe.core.console.command import as_typed
from lingvo_moe.core.pages import drawing, rendering
from lingvo_moe.tasks.mt.quality import intervals
from lingvo_moe.tasks.mt.quality.baselines import delta_curve
from lingvo_moe.tasks.mt.reports import report_figures, routing_page, score_tables
from lingvo_moe.tasks.mt.reports.language_names import name_and_code
from lingvo_moe.tasks.mt.reports.run_report import Missing, RunReport


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
    picture = drawing.svg(report_figures.deltas(curve), alt)
    return {"picture": picture, "window": curve["window"]}


def _curves(report: RunReport) -> list[str]:
    """The pictures of training; none where no metrics are there."""
    if isinstance(report.metrics, Missing):
        return []
    found = [(report_figures.losses(report.metrics, report.held_out), "loss")]
    if report.metrics[-1].get("learning_rate") is not None:
        found.append((report_figures.learning_rates(report.metrics), "learning rate"))
    if report.scored:
        for name, label in (("bleu", "BLEU"), ("chrf", "chrF")):
            found.append((report_figures.scores(report.scored, name, label), label))
    return [drawing.svg(figure, f"{what} by step") for figure, what in found]
