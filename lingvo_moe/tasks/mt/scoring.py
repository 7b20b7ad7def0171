"""BLEU and chrF (sacreBLEU) per language, by resource group and on average."""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from lingvo_moe.core.files import write_atomic
from lingvo_moe.tasks.mt.input import tsv
from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.line_stream import one_line

# Lines, and the language of each -> one translation each.
TranslateLines = Callable[[list[str], list[str]], Sequence[str]]
# (lines that are done, all lines).
Progress = Callable[[int, int], None]

GROUPS = ("high", "mid", "low")


@dataclass
class LanguageReport:
    """What was translated from a language, and its scores (0 to 100)."""

    bleu: float
    chrf: float
    train_pairs: int
    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    group: str = ""


@dataclass
class EvalReport:
    """The result of `evaluate`.

    Attributes:
        languages: by language code, sorted.
        signatures: sacreBLEU's, of 'bleu' and 'chrf': what to state beside a score.
        seconds: spent translating.
    """

    languages: dict[str, LanguageReport]
    signatures: dict[str, str]
    seconds: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    def Average(self, group: str = "") -> dict[str, float]:
        """The unweighted mean over the languages (of a group): bleu, chrf and how many languages."""
        chosen = [r for r in self.languages.values() if not group or r.group == group]
        count = len(chosen)
        return {
            "bleu": _mean([r.bleu for r in chosen]),
            "chrf": _mean([r.chrf for r in chosen]),
            "languages": count,
        }

    def ToDict(self) -> dict[str, Any]:
        """For JSON: scores without the texts."""
        groups = [g for g in GROUPS if any(r.group == g for r in self.languages.values())]
        return {
            **self.info,
            "average": self.Average(),
            "groups": {g: self.Average(g) | self._range(g) for g in groups},
            "languages": {
                lang: {
                    "bleu": r.bleu,
                    "chrf": r.chrf,
                    "lines": len(r.references),
                    "train_pairs": r.train_pairs,
                    "group": r.group,
                }
                for lang, r in self.languages.items()
            },
            "signatures": self.signatures,
            "seconds": self.seconds,
        }

    def _range(self, group: str) -> dict[str, int]:
        pairs = [r.train_pairs for r in self.languages.values() if r.group == group]
        return {"min_train_pairs": min(pairs), "max_train_pairs": max(pairs)}

    def WriteTexts(self, directory: str | Path) -> None:
        """`<lang>.src`, `<lang>.ref` and `<lang>.hyp`, a line for each pair, for other scorers."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for lang, r in self.languages.items():
            for suffix, lines in (
                ("src", r.sources),
                ("ref", r.references),
                ("hyp", r.hypotheses),
            ):
                text = "".join(f"{one_line(line)}\n" for line in lines)
                write_atomic(directory / f"{lang}.{suffix}", text.encode())


def evaluate(
    translate: TranslateLines,
    devset: Iterable[tuple[str, Sequence[tuple[str, str]]]],
    train_pairs: Mapping[str, int] | None = None,
    batch_lines: int = 1024,
    progress: Progress | None = None,
) -> EvalReport:
    """Translates held-out pairs and scores them.

    Args:
        translate: lines and their languages -> translations.
        devset: `(language, [(source, reference), ...])`, e.g. `DevSet(data_dir).items()`.
        train_pairs: training pairs of each language, from which the resource groups follow; None for no groups.
        batch_lines: lines handed to `translate` at once.
        progress: called after each batch.

    Raises:
        ValueError: an empty dev set, or `translate` returned another number of lines than it got.
    """
    data = {lang: list(pairs) for lang, pairs in devset}
    if not data:
        raise ValueError("nothing to evaluate: the dev set has no language")
    start = time.monotonic()
    # All languages together, so that the batches of a small dev set are full.
    sources = [source for pairs in data.values() for source, _ in pairs]
    langs = [lang for lang, pairs in data.items() for _ in pairs]
    translated: list[str] = []
    while len(translated) < len(sources):
        now = slice(len(translated), len(translated) + batch_lines)
        batch = sources[now]
        translations = translate(batch, langs[now])
        if len(translations) != len(batch):
            raise ValueError(f"{len(translations)} translations of {len(batch)} lines")
        translated += translations
        if progress:
            progress(len(translated), len(sources))
    seconds = time.monotonic() - start
    bleu, chrf = BLEU(), CHRF()
    rest = iter(translated)
    languages = {}
    for lang, pairs in data.items():
        references = [reference for _, reference in pairs]
        hypotheses = list(itertools.islice(rest, len(pairs)))
        languages[lang] = LanguageReport(
            bleu=bleu.corpus_score(hypotheses, [references]).score,
            chrf=chrf.corpus_score(hypotheses, [references]).score,
            train_pairs=(train_pairs or {}).get(lang, 0),
            sources=[source for source, _ in pairs],
            references=references,
            hypotheses=hypotheses,
        )
    languages = dict(sorted(languages.items()))
    if train_pairs is not None:
        for lang, group in resource_groups(
            {k: r.train_pairs for k, r in languages.items()}
        ).items():
            languages[lang].group = group
    signatures = {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())}
    return EvalReport(languages, signatures, seconds)


def count_train_pairs(
    data_dir: str | os.PathLike, languages: Iterable[str]
) -> dict[str, int] | None:
    """The training pairs of each language, 0 for one that has none; None for a directory of dev pairs alone."""
    try:
        files = tsv.language_files(data_dir)
    except DataError:
        return None
    return {
        lang: sum(1 for _ in tsv.read_pairs(files[lang])) if lang in files else 0
        for lang in languages
    }


def resource_groups(train_pairs: Mapping[str, int]) -> dict[str, str]:
    """Thirds of the languages by their training pairs: 'high', 'mid', 'low'. Names decide between equals."""
    ranked = sorted(train_pairs, key=lambda lang: (-train_pairs[lang], lang))
    return {lang: GROUPS[i * len(GROUPS) // len(ranked)] for i, lang in enumerate(ranked)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
