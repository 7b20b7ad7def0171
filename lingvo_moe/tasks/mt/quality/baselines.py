"""Compares one model of many languages with a bilingual model for each language (paper, figure 6)."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingvo_moe.tasks.mt.quality.scoring import EvalReport, pairs_digest, verify_scores

WINDOW = 10  # languages; the paper's
_PLACES = ("{lang}/eval/report.json", "{lang}/report.json", "{lang}.json")


@dataclass(frozen=True)
class Baseline:
    """The scores of one language's bilingual model."""

    file: Path  # the report of tools.evaluate that they are from
    scores: dict[str, float]  # its `bleu` and `chrf`
    signatures: dict[str, str]  # sacreBLEU's, of both


def read_baselines(
    directory: str | os.PathLike, devset: Iterable[tuple[str, Sequence[tuple[str, str]]]]
) -> dict[str, Baseline]:
    """Reads the scores of bilingual models.

    Args:
        directory: holds the reports of tools.evaluate: <lang>/eval/report.json, where <lang>/ is a run, or
            <lang>/report.json, or <lang>.json.
        devset: `(language, [(source, reference), ...])`, on which they were to be scored.

    Returns:
        The languages that have one.

    Raises:
        ValueError: no such directory; there is none at all, or one is damaged or was scored on other pairs.
    """
    if not Path(directory).is_dir():
        raise ValueError(f"--baselines={directory}: no such directory")
    baselines, missing = {}, []
    for lang, pairs in devset:
        file = _find(Path(directory), lang)
        if file is None:
            missing.append(lang)
        else:
            baselines[lang] = _read(file, lang, pairs)
    if missing and not baselines:
        raise ValueError(
            f"--baselines={directory}: no scores of {', '.join(missing[:5])}{' ...' * (len(missing) > 5)}; for each "
            "language there must be <lang>/eval/report.json: python -m tools.evaluate "
            f"--logdir={directory}/{missing[0]} --languages={missing[0]}"
        )
    return baselines


def add_baselines(report: EvalReport, baselines: Mapping[str, Baseline]) -> None:
    """Sets `baseline` of each language of the report that has one.

    Raises ValueError: one was scored in another way.
    """
    for lang, baseline in baselines.items():
        for kind, ours in report.signatures.items():
            if (theirs := baseline.signatures.get(kind)) != ours:
                raise ValueError(
                    f"{baseline.file}: {kind} was computed as {theirs}, here as {ours}: score it again"
                )
        report.languages[lang].baseline = baseline.scores


def delta_curve(scores: dict[str, Any], window: int = WINDOW) -> dict[str, Any]:
    """The curve of figure 6 from an EvalReport's ToDict.

    Returns:
        languages: those with a baseline, most training pairs first; delta_bleu of each; and smoothed, its mean over a
        window. Empty lists without baselines.
    """
    compared = {lang: one for lang, one in scores["languages"].items() if "delta" in one}
    ranked = sorted(compared, key=lambda lang: (-compared[lang]["train_pairs"], lang))
    deltas = [compared[lang]["delta"]["bleu"] for lang in ranked]
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


def _read(file: Path, lang: str, pairs: Sequence[tuple[str, str]]) -> Baseline:
    if file.name == "report.json":  # another is a copy, which has no list
        verify_scores(file.parent, [file.name])
    try:
        report = json.loads(file.read_text("utf-8"))
        scores = report["languages"][lang]
        baseline = Baseline(
            file, {k: float(scores[k]) for k in ("bleu", "chrf")}, dict(report["signatures"])
        )
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{file}: not a report of tools.evaluate with scores of {lang!r} ({type(e).__name__}: {e})"
        ) from None
    if scores.get("pairs_digest") != pairs_digest(*zip(*pairs)):
        raise ValueError(
            f"{file}: {lang!r} was scored on other pairs ({scores.get('lines')} of them, here {len(pairs)}): "
            "give both the same --data_dir and --max_per_language"
        )
    return baseline
