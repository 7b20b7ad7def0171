"""Compares one model of many languages with a bilingual model for each language (paper, figure 6)."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.tasks.mt.quality.scoring import EvalReport, verify_scores

WINDOW = 10  # languages; the paper's
_PLACES = ("{lang}/eval/report.json", "{lang}/report.json", "{lang}.json")


def add_baselines(report: EvalReport, directory: str | os.PathLike) -> list[str]:
    """Adds the scores of bilingual models to `report`.

    Args:
        report: gets `baseline` for each language that has one.
        directory: holds the reports of tools.evaluate: <lang>/eval/report.json, where <lang>/ is a run, or
            <lang>/report.json, or <lang>.json.

    Returns:
        The languages without one.

    Raises:
        ValueError: there is none at all, or one is damaged or was not scored on the same pairs in the same way.
    """
    if not Path(directory).is_dir():
        raise ValueError(f"--baselines={directory}: no such directory")
    missing = []
    for lang, found in report.languages.items():
        file = _find(Path(directory), lang)
        if file is None:
            missing.append(lang)
            continue
        scores = _read(file, lang)
        _check_same(file, lang, report, scores)
        one = scores["languages"][lang]
        found.baseline = {"bleu": one["bleu"], "chrf": one["chrf"]}
    if len(missing) == len(report.languages):
        raise ValueError(
            f"--baselines={directory}: no scores of {', '.join(missing[:5])}{' ...' * (len(missing) > 5)}; for each "
            "language there must be <lang>/eval/report.json: python -m tools.evaluate "
            f"--logdir={directory}/{missing[0]} --languages={missing[0]}"
        )
    return missing


def delta_curve(scores: dict[str, Any], window: int = WINDOW) -> dict[str, Any]:
    """The curve of figure 6 from an EvalReport's ToDict.

    Returns:
        languages: those with a baseline, most training pairs first; delta_bleu of each; and smoothed, its mean over a
        window. Empty lists without baselines.
    """
    found = {lang: one for lang, one in scores["languages"].items() if "delta" in one}
    ranked = sorted(found, key=lambda lang: (-found[lang]["train_pairs"], lang))
    deltas = [found[lang]["delta"]["bleu"] for lang in ranked]
    return {
        "languages": ranked,
        "delta_bleu": deltas,
        "smoothed": sliding_mean(deltas, window),
        "window": window,
    }


def sliding_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of `window` neighbours of each value, including itself; near the ends, of fewer.

    If `window` is even, one more neighbour follows the value than precedes it.
    """
    before, behind = (window - 1) // 2, window // 2
    parts = [values[max(i - before, 0) : i + behind + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _find(directory: Path, lang: str) -> Path | None:
    files = (directory / place.format(lang=lang) for place in _PLACES)
    return next((file for file in files if file.is_file()), None)


def _read(file: Path, lang: str) -> dict[str, Any]:
    if file.name == "report.json":  # another is a copy, which has no list
        verify_scores(file.parent, [file.name])
    try:
        scores = json.loads(file.read_text("utf-8"))
        _ = (
            scores["languages"][lang]["bleu"],
            scores["languages"][lang]["chrf"],
            scores["signatures"],
        )
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{file}: not a report of tools.evaluate with scores of {lang!r} ({type(e).__name__}: {e})"
        ) from None
    return scores


def _check_same(file: Path, lang: str, report: EvalReport, scores: dict[str, Any]) -> None:
    for kind, ours in report.signatures.items():
        if scores["signatures"].get(kind) != ours:
            raise ValueError(
                f"{file}: {kind} was computed as {scores['signatures'].get(kind)}, here as {ours}: score it again"
            )
    theirs, mine = scores["languages"][lang], report.languages[lang]
    if theirs.get("pairs_digest") != mine.pairs_digest:
        raise ValueError(
            f"{file}: {lang!r} was scored on other pairs ({theirs.get('lines')} of them, here {len(mine.references)}): "
            "give both the same --data_dir and --max_per_language"
        )
