"""The progress lines and the table of benchmarks/quality_peers.py."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.core.pages.tables import Table, markdown, numbers, words
from lingvo_moe.tasks.mt.quality.baselines import delta_curve
from lingvo_moe.tasks.mt.quality.intervals import with_margin

_MOST_LISTED = 12
_BILINGUAL = "bilingual_"  # how the names of such runs begin


def point(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A point of the curve, of what a contender reported: its loss is in nats a target token."""
    kept = {k: answer[k] for k in ("step", "cpu_seconds", "trained_tokens", "log_probs")}
    return {**kept, "loss": -sum(answer["log_probs"]) / answer["tokens"]}


def ahead(
    runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], tokens: Sequence[int]
) -> tuple[float, float]:
    """Returns by how much the last loss of runs is below that of others, nats a token, and the standard error of that.

    The error is that of differences pair by pair, of each pair's mean over seeds, and that of seeds beside it.

    Args:
        others: have the seeds of `runs` among theirs.
        tokens: of each held-out pair's target.
    """
    other = {run["setup"]["seed"]: run for run in others}
    differences = np.array(
        [
            np.subtract(*(r["curve"][-1]["log_probs"] for r in (run, other[run["setup"]["seed"]])))
            for run in runs
        ]
    )
    by_seed = differences.sum(1) / sum(tokens)
    mean = float(by_seed.mean())
    spread = differences.mean(0) - mean * np.array(tokens)
    variance = float((spread**2).sum()) / sum(tokens) ** 2
    if len(runs) > 1:
        variance += float(by_seed.var(ddof=1)) / len(runs)
    return mean, variance**0.5


def progress(name: str, answer: Mapping[str, Any], seconds: float) -> str:
    """A line about what a contender reported.

    Args:
        name: of the contender.
        answer: a progress or a point, see peers/budget.py.
        seconds: that it trains.
    """
    begin = f"{name}: step {answer['step']:,}, {answer['cpu_seconds']:,.0f} of {seconds:,.0f} CPU s"
    if answer["kind"] == "progress":
        return f"{begin}, loss {answer['loss']:.3f}"
    return f"{begin}, held-out loss {point(answer)['loss']:.4f}"


def together(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins reports of models of a language each, of one point or of the end, into that of one: see peers/budget.py."""

    def added(name: str) -> Any:
        values = [answer[name] for answer in answers]
        if isinstance(values[0], str):  # the same for all
            return values[0]
        return sum(values, [] if isinstance(values[0], list) else 0)

    return {name: added(name) for name in answers[0]}


def by_language(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: BLEU of each language, most training pairs first, and how far it is ahead of a model of the language.

    Empty without bilingual models.
    """
    by_says = _by_says(results)
    base = next((runs for runs in by_says.values() if _is_bilingual(runs)), None)
    if not base:
        return ""
    pairs = results[0]["setup"]["train_pairs"]
    ranked = sorted(pairs, key=lambda language: -pairs[language])
    others = {says: runs for says, runs in by_says.items() if runs is not base}
    alone = _bleu(base)

    def row(title: str, count: str, languages: Sequence[str]) -> list[str]:
        def mean(bleu: Mapping[str, float]) -> float:
            return statistics.mean(bleu[language] for language in languages)

        means = [mean(_bleu(runs)) for runs in others.values()]
        shown = [f"{value:.1f} ({value - mean(alone):+.1f})" for value in means]
        return [title, count, f"{mean(alone):.1f}", *shown]

    rows = [row(language, f"{pairs[language]:,}", [language]) for language in ranked]
    rows.append(row("all", f"{sum(pairs.values()):,}", ranked))
    columns = words("BLEU") + numbers("training pairs", base[0]["says"], *others)
    return markdown(Table(columns, rows)).rstrip()


def deltas(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The curve of the paper's figure 6 of each contender but the bilingual ones, by its first run's name."""
    by_says = _by_says(results)
    alone = next((_bleu(runs) for runs in by_says.values() if _is_bilingual(runs)), None)
    if not alone:
        return {}
    pairs = results[0]["setup"]["train_pairs"]

    def curve(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ahead = {k: {"bleu": bleu - alone[k]} for k, bleu in _bleu(runs).items()}
        entries = {k: {"train_pairs": pairs[k], "delta": delta} for k, delta in ahead.items()}
        return delta_curve({"languages": entries})

    return {runs[0]["name"]: curve(runs) for runs in by_says.values() if not _is_bilingual(runs)}


def _by_says(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The runs of each contender, those of its seeds, by what is said of it."""
    by_says: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_says.setdefault(result["says"], []).append(result)
    return by_says


def _is_bilingual(runs: Sequence[Mapping[str, Any]]) -> bool:
    return runs[0]["name"].startswith(_BILINGUAL)


def _bleu(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """BLEU of each language, the mean over seeds."""
    languages = runs[0]["languages"]
    return {k: statistics.mean(run["languages"][k]["bleu"] for run in runs) for k in languages}


def table(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each contender, the mean of its seeds, in the order of the results."""
    by_says = _by_says(results)
    parts = [p / results[0]["setup"]["points"][-1] for p in results[0]["setup"]["points"]]
    heads = [f"loss at {about['cpu_seconds'] * part:,.0f} s" for part in parts]
    too_long = " and ".join(f"{n:,}" for n in about["too_long"])
    about_all = (
        f"{_languages(about['languages'])} into English,"
        f" {about['train_pairs']:,} training pairs, {about['held_out_pairs']:,} held-out pairs of"
        f" {about['held_out_tokens']:,} target tokens; {too_long} longer pairs are left out for all."
        f" One core, {about['cpu_seconds']:,.0f} CPU seconds of training each{_shared(results)}."
        f" Loss in nats a target token, without label smoothing; BLEU and chrF are means over the languages, beam"
        f" {about['beam_size']}."
    )
    figures = numbers("parameters", "steps", "target tokens seen", *heads, "BLEU", "chrF")
    rows = [_row(says, runs) for says, runs in by_says.items()]
    without = _best([runs for runs in by_says.values() if runs[0]["name"].startswith("dense_")])
    if without and len(by_says) > 1:
        figures += numbers("ahead of no experts by")
        for row, runs in zip(rows, by_says.values(), strict=True):
            row.append(_ahead(runs, without, about["lengths"]))
    contenders = markdown(Table(words("") + figures, rows)).rstrip()
    return "\n\n".join(part for part in (about_all, contenders, by_language(results)) if part)


def _shared(results: Sequence[Mapping[str, Any]]) -> str:
    return ", models of a language all together" * any(_is_bilingual([run]) for run in results)


def _best(rows: Sequence[Sequence[Mapping[str, Any]]]) -> Sequence[Mapping[str, Any]]:
    """The runs of the row with the lowest last loss, the mean over its seeds; () of no rows. A loss may be NaN."""

    def loss(runs: Sequence[Mapping[str, Any]]) -> float:
        mean = statistics.mean(run["curve"][-1]["loss"] for run in runs)
        return math.inf if math.isnan(mean) else mean

    return min(rows, key=loss, default=())


def _ahead(
    runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], lengths: Sequence[int]
) -> str:
    seeds = {run["setup"]["seed"] for run in others}
    if runs is others or not seeds.issuperset(run["setup"]["seed"] for run in runs):
        return ""
    mean, error = ahead(runs, others, lengths)
    return f"{mean:.3f} ± {error:.3f}"


def _languages(names: Sequence[str]) -> str:
    listed = f" ({', '.join(names)})" if len(names) <= _MOST_LISTED else ""
    return f"{len(names)} languages{listed}"


def _row(says: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    last = [run["curve"][-1] for run in runs]
    losses = [[run["curve"][i]["loss"] for run in runs] for i in range(len(runs[0]["curve"]))]
    return [
        says if len(runs) == 1 else f"{says}, {len(runs)} seeds",
        f"{runs[0]['parameters'] / 1e6:.1f} M",
        f"{statistics.mean(p['step'] for p in last):,.0f}",
        f"{statistics.mean(p['trained_tokens'] for p in last) / 1e6:.2f} M",
        *map(_mean, losses),
        *(_score(runs, name) for name in ("bleu", "chrf")),
    ]


def _mean(losses: Sequence[float]) -> str:
    """The mean over seeds, and its standard error."""
    mean = statistics.mean(losses)
    if len(losses) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {statistics.stdev(losses) / len(losses) ** 0.5:.3f}"


def _score(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    """The mean over seeds; of one seed with its confidence interval."""
    if len(runs) == 1:
        average = runs[0]["average"]
        return with_margin(average[name], average[f"{name}_margin"])
    return f"{statistics.mean(run['average'][name] for run in runs):.1f}"
