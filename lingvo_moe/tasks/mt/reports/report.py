"""Writes the page about a run: one HTML file without scripts or external files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lingvo_moe.core.console.command import as_typed
from lingvo_moe.core.pages import drawing, markup
from lingvo_moe.core.pages.markup import Html
from lingvo_moe.tasks.mt.input.resource_groups import GROUPS
from lingvo_moe.tasks.mt.quality import intervals
from lingvo_moe.tasks.mt.quality.baselines import delta_curve
from lingvo_moe.tasks.mt.quality.scoring import reading_order
from lingvo_moe.tasks.mt.reports import report_figures, routing_page
from lingvo_moe.tasks.mt.reports.language_names import english_name, name_and_code
from lingvo_moe.tasks.mt.reports.run_report import Missing, RunReport
from lingvo_moe.tasks.mt.reports.samples import Sample

_STYLE = """
dl.figures { grid-template-columns: repeat(auto-fit, minmax(min(8.2rem, 44%), 1fr)) }
.scores td, .scores th { padding: .2rem .8rem .2rem 0 } .scores .b { display: grid; align-items: center; gap: .5rem;
  grid-template-columns: minmax(2.2rem, 1fr) 5.2rem; text-align: right } .scores .bar { height: .62rem }
.scores td:nth-child(5), .scores td:nth-child(6) { width: 28% } .scores th.n:nth-child(n+5) { text-align: left }
.scores .few { color: var(--soft) } .scores .few .bar { opacity: .35 } .scores .swatch { margin-right: .5rem }
.code { color: var(--soft); margin-left: .25rem }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin-top: .8rem }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 0 2rem }
.sample { border-top: 1px solid var(--rule); padding: .6rem 0 .8rem; break-inside: avoid; min-width: 0 }
.sample p { margin: .1rem 0; overflow-wrap: anywhere } .sample .ours { font-weight: 600 }
.sample .what { font: .78rem ui-sans-serif, system-ui, sans-serif; color: var(--soft) }
.sample dl { display: grid; grid-template-columns: 5.2rem 1fr; gap: .1rem .6rem; margin: .2rem 0 0 }
.sample dd { margin: 0; overflow-wrap: anywhere; min-width: 0 }
.sample dt { font-size: .78rem; color: var(--soft); padding-top: .15rem }
.missing { border-left: 3px solid var(--rule); padding: .1rem 0 .1rem .9rem } .missing code { overflow-wrap: anywhere }
.signature { overflow-wrap: anywhere }
@media print { nav { display: none } }
@media (max-width: 36rem) { .scores td, .scores th { padding-right: .5rem; white-space: normal }
  .by-language td:nth-child(2), .by-language th:nth-child(2) { display: none }
  .scores .b { grid-template-columns: minmax(1rem, 1fr) 4.6rem; gap: .3rem } }
"""
# Colours of the resource groups; '' is all languages, or those of no group.
_COLOURS = {"high": "first", "mid": "third", "low": "fourth", "": "second"}
_KINDS = {
    "best": "Best by chrF",
    "worst": "Worst by chrF",
    "random": "At random",
}


def html_report(report: RunReport) -> Html:
    """The whole page."""
    sections = {
        "Quality": _quality(report),
        "Against bilingual models": _against(report),
        "Translations": _translations(report),
        "Training": _training(report),
        "Which language goes to which expert": _routing(report),
        "Settings": _settings(report),
    }
    links = (f"<a href='#part{i}'>{title}</a>" for i, title in enumerate(sections))
    body = [
        "<header><p class='kicker'>A translation model, from its run</p>",
        f"<h1>{escape(report.name)}</h1></header>",
        markup.figures(_headline(report)),
        f"<nav class='note'>{''.join(links)}</nav>",
        *(f"<h2 id='part{i}'>{t}</h2>{html}" for i, (t, html) in enumerate(sections.items())),
    ]
    return markup.document(f"{report.name}: report", "".join(body), style=_STYLE)


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


def _missing(missing: Missing) -> Html:
    command = escape(as_typed(missing.command))
    command = command and f" It is made by <code>{command}</code>."
    return f"<p class='note missing'>Not shown: {escape(missing.why)}.{command}</p>"


# --- scores


@dataclass(frozen=True)
class _Row:
    """A row of a table of scores: its first two cells as HTML, and the scores of a language or a mean as in JSON."""

    first: Html
    second: Html
    pairs: str
    group: str
    scores: Mapping[str, Any]
    delta: float | None
    is_few: bool = False

    def Score(self, kind: str) -> str:
        """The score with its margin; reports of older versions have none."""
        return intervals.with_margin(self.scores[kind], self.scores.get(f"{kind}_margin"))


def _quality(report: RunReport) -> Html:
    scores = report.scores
    if isinstance(scores, Missing):
        return _missing(scores)
    parts = []
    groups = {g: scores["groups"][g] for g in GROUPS if g in scores["groups"]}
    if groups:
        ranges = {g: _range(one) for g, one in groups.items()}
        rows = [
            _Row(
                f"{_swatch(g)}{g or 'all'}",
                str(one["languages"]),
                ranges.get(g, ""),
                g,
                one | {"lines": _lines_of(scores, g)},
                one.get("delta_bleu"),
                intervals.has_few(_lines_of(scores, g)),
            )
            for g, one in (groups | {"": scores["average"]}).items()
        ]
        parts += ["<h3>By training data</h3>", _table(("group", "languages"), rows)]
    rows = [
        _Row(
            f"{_swatch(r['group'])}{_language(lang)}",
            escape(r["group"]),
            f"{r['train_pairs']:,}",
            r["group"],
            r,
            (r.get("delta") or {}).get("bleu"),
            intervals.has_few(r["lines"]),
        )
        for lang, r in sorted(scores["languages"].items(), key=lambda item: _order(item[1]))
    ]
    parts += ["<h3>By language</h3>", _table(("language", "group"), rows, "by-language")]
    said = "; ".join(scores["signatures"].values())
    note = f"A full bar is a score of 100. {intervals.footnote()}"
    parts.append(f"<p class='note'>{escape(note)}</p>")
    return "".join(parts) + f"<p class='note signature'>sacreBLEU: {escape(said)}.</p>"


def _order(language: Mapping[str, Any]) -> tuple[int, bool, int]:
    return reading_order(language["group"], language["lines"], language["train_pairs"])


def _lines_of(scores: Mapping[str, Any], group: str) -> int:
    """The lines of a group's languages; '' is all."""
    languages = scores["languages"].values()
    return sum(one["lines"] for one in languages if not group or one["group"] == group)


def _swatch(group: str) -> Html:
    return f"<i class='swatch' style='background:var(--{_COLOURS[group]})'></i>"


def _language(code: str) -> Html:
    """Its name, and its code where that says more."""
    name = english_name(code)
    shown = f"<span class='code'>{escape(code)}</span>"
    return f"{escape(name)} {shown}" if name else escape(code)


def _range(group: Mapping[str, Any]) -> str:
    return f"{group['min_train_pairs']:,} to\u00a0{group['max_train_pairs']:,}"


def _table(names: tuple[str, str], rows: Sequence[_Row], cls: str = "") -> Html:
    """Rows of two columns by these names, training pairs, lines, scores in their group's colour, delta BLEU."""
    heads = [(name, False, False) for name in names]
    heads += [(name, True, False) for name in ("training pairs", "lines", "BLEU", "chrF")]
    compared = any(row.delta is not None for row in rows)
    if compared:
        heads.append(("delta BLEU", True, False))
    cells = []
    for row in rows:
        few = " few" * row.is_few
        lines = f"{row.scores['lines']:,}{intervals.FEW * row.is_few}"
        cell = [row.first, row.second, row.pairs, lines]
        for kind in ("bleu", "chrf"):
            said = row.Score(kind)
            drawn = markup.bar([(kind, _COLOURS[row.group], row.scores[kind] / 100, said)])
            cell.append(f"<span class='b{few}'>{drawn}<span>{said}</span></span>")
        cells.append(cell + [("" if row.delta is None else f"{row.delta:+.1f}")] * compared)
    return f"<div class='scores {cls}'>{markup.table(heads, cells)}</div>"


def _against(report: RunReport) -> Html:
    if isinstance(report.scores, Missing):
        return _missing(report.scores)
    curve = delta_curve(report.scores)
    if not curve["languages"]:
        run = (report.scores.get("model") or {}).get("logdir", "RUN")
        return _missing(
            Missing(
                "no bilingual models were scored (docs/quality.md)",
                f"python -m tools.evaluate --logdir={run} --baselines=BILINGUAL --rescore",
            )
        )
    count = len(curve["languages"])
    alt = f"delta BLEU of {count} languages, by training pairs"
    picture = drawing.svg(report_figures.deltas(curve), alt)
    note = (
        "How many points of BLEU this one model has over a bilingual model of each language, trained by the same "
        f"trainer, on the same lines. The line is a sliding mean over {curve['window']} languages, fewer at the ends."
    )
    return f"<figure class='drawing'>{picture}<figcaption>{escape(note)}</figcaption></figure>"


# --- the rest


def _translations(report: RunReport) -> Html:
    if isinstance(report.samples, Missing):
        return _missing(report.samples)
    parts = []
    for kind, title in _KINDS.items():
        cards = "".join(map(_sample, report.samples[kind]))
        parts.append(f"<h3>{title}</h3><div class='samples'>{cards}</div>")
    note = (
        "At most one line of a language in each; best and worst are of lines that are no copies and whose reference "
        "has three words at least."
    )
    return "".join(parts) + f"<p class='note'>{note}</p>"


def _sample(sample: Sample) -> Html:
    lines = (
        (
            "source",
            sample.source,
            f" lang='{escape(sample.language.replace('_', '-'), quote=True)}'",
        ),
        ("reference", sample.reference, ""),
        ("ours", sample.translation or "(nothing)", " class='ours'"),
    )
    cells = "".join(
        f"<dt>{name}</dt><dd dir='auto'{more}>{escape(text)}</dd>" for name, text, more in lines
    )
    what = f"{escape(name_and_code(sample.language))}, chrF {sample.chrf:.0f}"
    return f"<div class='sample'><p class='what'>{what}</p><dl>{cells}</dl></div>"


def _training(report: RunReport) -> Html:
    if isinstance(report.metrics, Missing):
        return _missing(report.metrics)
    curves = report_figures.losses(report.metrics, report.held_out)
    drawings = [drawing.svg(curves, "loss by step")]
    if report.metrics[-1].get("learning_rate") is not None:
        figure = report_figures.learning_rates(report.metrics)
        drawings.append(drawing.svg(figure, "learning rate by step"))
    if report.scored:
        for name, label in (("bleu", "BLEU"), ("chrf", "chrF")):
            figure = report_figures.scores(report.scored, name, label)
            drawings.append(drawing.svg(figure, f"{label} by step"))
    figures = "".join(f"<figure class='drawing'>{one}</figure>" for one in drawings)
    note = "The loss is of smoothed labels, with the auxiliary losses of the experts in it."
    if report.held_out:
        note += " The lowest held-out loss is marked: that of the best checkpoint."
    return f"<div class='pair'>{figures}</div><p class='note'>{note}</p>"


def _routing(report: RunReport) -> Html:
    found = report.routing
    return _missing(found) if isinstance(found, Missing) else routing_page.section(found)


def _settings(report: RunReport) -> Html:
    facts = markup.facts(report.settings + report.extra)
    if not report.params:
        return facts
    params = f"<pre>{escape(report.params)}</pre>"
    return f"{facts}<details><summary>All parameters</summary>{params}</details>"
