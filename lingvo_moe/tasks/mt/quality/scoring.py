"""BLEU and chrF (sacreBLEU) per language, by resource group and on average."""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sacrebleu.metrics import CHRF

from lingvo_moe.core.files.files import write_atomic
from lingvo_moe.core.files.manifest import write_manifest
from lingvo_moe.tasks.mt.quality import intervals
from lingvo_moe.tasks.mt.quality.bleu import make_bleu
from lingvo_moe.tasks.mt.quality.kept_translations import TranslateLines
from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.errors import DataError, NoDataError
from lingvo_moe.tasks.text.data.file_list import data_files, local_data, verify_where_listed
from lingvo_moe.tasks.text.data.prepared import Prepared
from lingvo_moe.tasks.text.data.resource_groups import GROUPS, resource_groups
from lingvo_moe.tasks.text.decoding.line_stream import one_line, read_lines

# (lines that are done, all lines).
Progress = Callable[[int, int], None]

METRICS = ("bleu", "chrf")
LIST = "report.sha256"
_SUFFIXES = ("src", "ref", "hyp")


@dataclass(frozen=True)
class EvalOptions:
    """The way to evaluate.

    Attributes:
        batch_lines: lines translated at once.
        bounds: of the resource groups; see `resource_groups`.
        language: the code of the target language, '' where it is not known; BLEU's tokenizer follows it.
        tokenizer: of BLEU; None for that of the language.
    """

    batch_lines: int = 1024
    bounds: tuple[int, int] | None = None
    language: str = ""
    tokenizer: str | None = None


_DEFAULTS = EvalOptions()


@dataclass
class LanguageReport:
    """The translations of one language, and their scores (0 to 100)."""

    scores: dict[str, float]  # `bleu` and `chrf`
    margins: dict[str, float | None]  # the margins of the scores; see intervals.margin
    train_pairs: int  # the pairs in training
    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    group: str = ""  # one of GROUPS, or ''
    # `bleu` and `chrf` of another model on the same lines; see baselines.py.
    baseline: dict[str, float] | None = None

    @property
    def delta(self) -> dict[str, float] | None:
        """The gain over the baseline in `bleu` and `chrf`; None without a baseline."""
        if self.baseline is None:
            return None
        return {kind: score - self.baseline[kind] for kind, score in self.scores.items()}

    @property
    def pairs_digest(self) -> str:
        """See pairs_digest."""
        return pairs_digest(self.sources, self.references)

    def ToDict(self) -> dict[str, Any]:
        """The fields for JSON, without the texts."""
        out: dict[str, Any] = {
            **self.scores,
            **{f"{kind}_margin": margin for kind, margin in self.margins.items()},
            "lines": len(self.references),
            "few_lines": intervals.has_few(len(self.references)),
            "pairs_digest": self.pairs_digest,
            "train_pairs": self.train_pairs,
            "group": self.group,
        }
        if self.baseline is not None:
            out |= {"baseline": self.baseline, "delta": self.delta}
        return out


@dataclass
class EvalReport:
    """The result of `evaluate`."""

    languages: dict[str, LanguageReport]  # by language code, sorted
    signatures: dict[str, str]  # sacreBLEU's, of 'bleu' and 'chrf': what to state beside a score
    seconds: float = 0.0  # spent translating
    info: dict[str, Any] = field(default_factory=dict)

    def Average(self, group: str = "") -> dict[str, Any]:
        """The unweighted mean over the languages (of a group).

        Returns:
            bleu and chrf; bleu_margin and chrf_margin, None where a language has none; how many languages and lines;
            and, where there are baselines, delta_bleu, delta_chrf and of how many languages these are.
        """
        chosen = [r for r in self.languages.values() if not group or r.group == group]
        out: dict[str, Any] = {
            **{kind: _mean([r.scores[kind] for r in chosen]) for kind in METRICS},
            **{
                f"{kind}_margin": intervals.margin_of_mean(r.margins[kind] for r in chosen)
                for kind in METRICS
            },
            "languages": len(chosen),
            "lines": sum(len(r.references) for r in chosen),
        }
        deltas = [r.delta for r in chosen if r.delta is not None]
        if deltas:
            out |= {f"delta_{kind}": _mean([d[kind] for d in deltas]) for kind in METRICS}
            out["baselines"] = len(deltas)
        return out

    @property
    def groups(self) -> list[str]:
        """The resource groups that some language is of."""
        return [g for g in GROUPS if any(r.group == g for r in self.languages.values())]

    def InOrder(self) -> list[str]:
        """The languages in the order of `reading_order`."""

        def key(lang: str) -> tuple[int, bool, int]:
            one = self.languages[lang]
            return reading_order(one.group, len(one.references), one.train_pairs)

        return sorted(self.languages, key=key)

    def ToDict(self) -> dict[str, Any]:
        """The scores for JSON, without the texts."""
        return {
            **self.info,
            "average": self.Average(),
            "groups": {g: self.Average(g) | self._range(g) for g in self.groups},
            "languages": {lang: r.ToDict() for lang, r in self.languages.items()},
            "signatures": self.signatures,
            "intervals": {
                "confidence": 0.95,
                "resamples": intervals.RESAMPLES,
                "enough_lines": intervals.ENOUGH_LINES,
            },
            "seconds": self.seconds,
        }

    def _range(self, group: str) -> dict[str, int]:
        pairs = [r.train_pairs for r in self.languages.values() if r.group == group]
        return {"min_train_pairs": min(pairs), "max_train_pairs": max(pairs)}

    def Write(self, directory: str | Path) -> None:
        """Writes report.json, the texts for other scorers, and LIST, the list of their SHA-256. Raises OSError.

        `texts/<lang>.src`, `.ref` and `.hyp` have a line for each pair. `comet/src.txt`, `ref.txt` and `hyp.txt` have
        the lines of all languages, as comet-score takes them, and `lang.txt` the language of each, to take its scores
        apart again.
        """
        contents = {
            f"texts/{lang}.{suffix}": _lines(lines)
            for lang, r in self.languages.items()
            for suffix, lines in zip(_SUFFIXES, (r.sources, r.references, r.hypotheses))
        }
        for suffix in _SUFFIXES:
            texts = (contents[f"texts/{lang}.{suffix}"] for lang in self.languages)
            contents[f"comet/{suffix}.txt"] = b"".join(texts)
        langs = [lang for lang, r in self.languages.items() for _ in r.references]
        contents["comet/lang.txt"] = _lines(langs)
        contents["report.json"] = (
            json.dumps(self.ToDict(), indent=2, ensure_ascii=False).encode() + b"\n"
        )
        for name, data in contents.items():
            (Path(directory) / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(directory) / name, data)
        write_manifest(Path(directory), LIST, list(contents))


def reading_order(group: str, lines: int, train_pairs: int) -> tuple[int, bool, int]:
    """A key that sorts languages by group, high first; within it those with enough lines first, then by training pairs,
    most first."""
    rank = GROUPS.index(group) if group in GROUPS else len(GROUPS)
    return rank, intervals.has_few(lines), -train_pairs


def verify_scores(directory: str | os.PathLike, paths: Iterable[str], warn: bool = True) -> None:
    """Raises DataError where files that EvalReport.Write wrote and listed are damaged; without a list it warns.

    `warn` is False for further files, where a missing list was warned of before.
    """
    verify_where_listed(directory, LIST, paths, "tools.evaluate", warn)


def pairs_digest(sources: Iterable[str], references: Iterable[str]) -> str:
    """A digest of the lines, which shows whether two models were scored on the same lines."""
    lines = "\n".join(map(one_line, (*sources, *references)))
    return hashlib.sha256(lines.encode("utf-8", "replace")).hexdigest()[:16]


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{one_line(line)}\n" for line in lines).encode("utf-8", "replace")


def evaluate(
    translate: TranslateLines,
    devset: Iterable[tuple[str, Sequence[tuple[str, str]]]],
    train_pairs: Mapping[str, int] | None = None,
    options: EvalOptions = _DEFAULTS,
    progress: Progress | None = None,
) -> EvalReport:
    """Translates held-out pairs and scores them.

    Args:
        translate: lines and their languages -> translations.
        devset: `(language, [(source, reference), ...])`, e.g. `DevSet(data_dir).items()`.
        train_pairs: training pairs of each language, from which the resource groups follow; None for no groups.

    Raises:
        ValueError: an empty dev set, `translate` returned another number of lines than it got, or BLEU's tokenizer
            is not installed.
    """
    data = {lang: list(pairs) for lang, pairs in devset}
    if not data:
        raise ValueError("nothing to evaluate: the dev set has no language")
    references = [reference for pairs in data.values() for _, reference in pairs]
    metrics = {"bleu": make_bleu(options.tokenizer, options.language, references), "chrf": CHRF()}
    start = time.monotonic()
    # All languages together, so that the batches of a small dev set are full.
    sources = [source for pairs in data.values() for source, _ in pairs]
    langs = [lang for lang, pairs in data.items() for _ in pairs]
    translated: list[str] = []
    while len(translated) < len(sources):
        window = slice(len(translated), len(translated) + options.batch_lines)
        batch = sources[window]
        translations = translate(batch, langs[window])
        if len(translations) != len(batch):
            raise ValueError(f"{len(translations)} translations of {len(batch)} lines")
        translated += translations
        if progress:
            progress(len(translated), len(sources))
    seconds = time.monotonic() - start
    rest = iter(translated)
    languages = {}
    for lang, pairs in data.items():
        own_sources, references = ([pair[side] for pair in pairs] for side in (0, 1))
        hypotheses = list(itertools.islice(rest, len(pairs)))
        languages[lang] = LanguageReport(
            {k: m.corpus_score(hypotheses, [references]).score for k, m in metrics.items()},
            {k: intervals.margin(m, hypotheses, references) for k, m in metrics.items()},
            (train_pairs or {}).get(lang, 0),
            own_sources,
            references,
            hypotheses,
        )
    languages = dict(sorted(languages.items()))
    if train_pairs is not None:
        counts = {k: r.train_pairs for k, r in languages.items()}
        for lang, group in resource_groups(counts, options.bounds).items():
            languages[lang].group = group
    signatures = {kind: str(metric.get_signature()) for kind, metric in metrics.items()}
    return EvalReport(languages, signatures, seconds)


def count_train_pairs(
    data_dir: str | os.PathLike, languages: Iterable[str]
) -> dict[str, int] | None:
    """The training pairs of each language, 0 for one that has none; None for a directory of dev pairs alone.

    Raises DataError: two files of a language, or data of tools.prepare or tools.build_corpus that is damaged.
    """
    languages, data_dir = list(languages), local_data(data_dir)
    try:
        files, listed = data_files(data_dir)
    except NoDataError:
        return None
    if prepared := Prepared.Of(files, listed):  # has counted them
        return {lang: prepared.pairs.get(lang, 0) for lang in languages}
    if listed:
        listed.Verify(files[lang] for lang in languages if lang in files)
    return {
        lang: sum(1 for _ in tsv.read_pairs(files[lang])) if lang in files else 0
        for lang in languages
    }


def read_translations(
    directory: str | os.PathLike, devset: Iterable[tuple[str, Sequence[tuple[str, str]]]]
) -> tuple[list[str], list[str]]:
    """Reads the translations in `texts`, so as to score them again: those of `Write`, or another system's.

    Returns:
        The translations of all pairs of a dev set, in order; and the languages whose file is not what `Write` left.

    Raises ValueError: a file is missing, sources are damaged, or the lines are not those of these pairs.
    """
    directory, devset = Path(directory), list(devset)
    for lang, _ in devset:
        for file in (directory / f"{lang}.src", directory / f"{lang}.hyp"):
            if not file.is_file():
                raise ValueError(f"{file}: missing; translate first, without --rescore")
    verify_scores(directory.parent, (f"{directory.name}/{lang}.src" for lang, _ in devset))
    out, replaced = [], []
    for lang, pairs in devset:
        sources, hypotheses = (_read_texts(directory / f"{lang}.{side}") for side in ("src", "hyp"))
        if sources != [one_line(source) for source, _ in pairs]:
            raise ValueError(
                f"{directory}/{lang}.src does not have the {len(pairs)} requested sources: translate again, "
                "without --rescore, or give the same --data_dir and --max_per_language as then"
            )
        if len(hypotheses) != len(pairs):
            raise ValueError(
                f"{directory}/{lang}.hyp has {len(hypotheses)} lines for the {len(pairs)} of {lang}.src"
            )
        try:
            verify_scores(directory.parent, [f"{directory.name}/{lang}.hyp"], warn=False)
        except DataError:
            replaced.append(lang)
        out += hypotheses
    return out, replaced


def _read_texts(file: Path) -> list[str]:
    """The lines of a file, with or without a newline at its end. Raises ValueError: one is not UTF-8."""
    with open(file, "rb") as source:
        try:
            return [line.text.decode("utf-8") for line in read_lines(source)]
        except UnicodeDecodeError as e:
            raise ValueError(f"{file}: it is not UTF-8 ({e})") from None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
