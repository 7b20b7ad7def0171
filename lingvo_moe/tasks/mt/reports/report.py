"""Writes the page about a run: one HTML file without scripts or external files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lingvo_moe.core.console.command import as_typed
from lingvo_moe.core.pages import drawing, rendering
from lingvo_moe.core.pages.tables import Piece
from lingvo_moe.tasks.mt.input.resource_groups import GROUPS
from lingvo_moe.tasks.mt.quality import intervals
from lingvo_moe.tasks.mt.quality.baselines import delta_curve
from lingvo_moe.tasks.mt.quality.scoring import reading_order
from lingvo_moe.tasks.mt.reports import report_figures, routing_page
from lingvo_moe.tasks.mt.reports.language_names import english_name, name_and_code
from lingvo_moe.tasks.mt.reports.run_report import Missing, RunReport

# Colours of the resource groups; '' is all languages, or those of no group.
_COLOURS = {"high": "first", "mid": "third", "low": "fourth", "": "second"}


def html_report(report: RunReport) -> str:
    """The whole page."""
    scores, routing = report.scores, report.routing
    return rendering.html(
        __package__,
        "run.html",
        report=report,
        headline=_headline(report),
        groups=[] if isinstance(scores, Missing) else _groups(scores),
        languages=[] if isinstance(scores, Missing) else _languages(scores),
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


@dataclass(frozen=True)
class _Row:
    """A row of a table of scores, which are of a language or a mean, as in JSON."""

    name: str
    code: str
    second: str
    pairs: str
    group: str
    num_lines: int
    scores: Mapping[str, Any]
    delta: float | None

    @property
    def colour(self) -> str:
        return _COLOURS[self.group]

    @property
    def is_few(self) -> bool:
        return intervals.has_few(self.num_lines)

    @property
    def lines(self) -> str:
        return f"{self.num_lines:,}{intervals.FEW * self.is_few}"

    def Score(self, kind: str) -> Piece:
        """The score, as a bar, and with its margin; reports of older versions have none."""
        text = intervals.with_margin(self.scores[kind], self.scores.get(f"{kind}_margin"))
        return Piece(kind, self.colour, self.scores[kind], text)


def _groups(scores: Mapping[str, Any]) -> list[_Row]:
    """A row for each resource group and one for all languages; none where no language has a group."""
    groups = {group: scores["groups"][group] for group in GROUPS if group in scores["groups"]}
    rows = []
    for group, one in (groups | {"": scores["average"]}).items():
        lines = [r["lines"] for r in scores["languages"].values() if group in ("", r["group"])]
        pairs = f"{one['min_train_pairs']:,} to\u00a0{one['max_train_pairs']:,}" if group else ""
        counts = str(one["languages"]), pairs, group, sum(lines)
        rows.append(_Row(group or "all", "", *counts, one, one.get("delta_bleu")))
    return rows if groups else []


def _languages(scores: Mapping[str, Any]) -> list[_Row]:
    """A row for each language, in reading order."""
    rows = []
    for code, one in scores["languages"].items():
        name, delta = english_name(code), (one.get("delta") or {}).get("bleu")
        counts = f"{one['train_pairs']:,}", one["group"], one["lines"]
        rows.append(_Row(name or code, code if name else "", one["group"], *counts, one, delta))
    return sorted(rows, key=lambda r: reading_order(r.group, r.num_lines, r.scores["train_pairs"]))


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
