"""The tables of scores by language and by resource group, on the page about a run and printed by tools.evaluate.

Scores are those of an evaluation as in its report.json: see EvalReport.ToDict.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lingvo_moe.core.pages.tables import PageCell, Piece, Table, numbers, words
from lingvo_moe.tasks.mt.quality.intervals import FEW, has_few, with_margin
from lingvo_moe.tasks.mt.quality.scoring import reading_order
from lingvo_moe.tasks.mt.reports.language_names import name_and_code
from lingvo_moe.tasks.text.data.resource_groups import GROUPS

# Colours of the resource groups; '' is all languages, or those of no group.
_COLOURS = {"high": "first", "mid": "third", "low": "fourth", "": "second"}


def by_group(scores: Mapping[str, Any]) -> Table:
    """A row for each resource group and one for the mean of all languages."""
    groups = {group: scores["groups"][group] for group in GROUPS if group in scores["groups"]}
    rows = []
    for group, one in (groups | {"": scores["average"]}).items():
        lines = [r["lines"] for r in scores["languages"].values() if group in ("", r["group"])]
        pairs = f"{one['min_train_pairs']:,} to\u00a0{one['max_train_pairs']:,}" if group else ""
        first = [PageCell(group or "all", _COLOURS[group]), str(one["languages"]), pairs]
        rows.append([*first, *_cells(group, sum(lines), one, one.get("delta_bleu"))])
    return _table(["group", "languages"], rows)


def by_language(scores: Mapping[str, Any]) -> Table:
    """A row for each language, in reading order."""

    def place(item: tuple[str, Mapping[str, Any]]) -> tuple[int, bool, int]:
        return reading_order(item[1]["group"], item[1]["lines"], item[1]["train_pairs"])

    rows = []
    for code, one in sorted(scores["languages"].items(), key=place):
        group, delta = one["group"], (one.get("delta") or {}).get("bleu")
        first = [PageCell(name_and_code(code), _COLOURS[group]), group, f"{one['train_pairs']:,}"]
        rows.append([*first, *_cells(group, one["lines"], one, delta)])
    return _table(["language", "group"], rows)


def _cells(group: str, lines: int, scores: Mapping[str, Any], delta: float | None) -> Iterator[str]:
    """Yields the number of lines, the scores with their margins, and the gain in BLEU over baselines, '' for none."""
    few = has_few(lines)
    yield f"{lines:,}{FEW * few}"
    for kind in ("bleu", "chrf"):
        text = with_margin(scores[kind], scores.get(f"{kind}_margin"))
        yield PageCell(text, piece=Piece(kind, _COLOURS[group], scores[kind], text), faint=few)
    yield "" if delta is None else f"{delta:+.1f}"


def _table(first: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    columns = words(*first) + numbers("training pairs", "lines", "BLEU", "chrF", "delta BLEU")
    if any(row[-1] for row in rows):
        return Table(columns, rows)
    return Table(columns[:-1], [row[:-1] for row in rows])
