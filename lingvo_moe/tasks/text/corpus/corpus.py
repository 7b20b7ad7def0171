"""Builds a corpus X -> English from installed packages: without a network, with the same bytes every time.

Layout: `<lang>.tsv.gz` for training and `dev/<lang>.tsv.gz`, lines `source<TAB>english<TAB>origin`, and `corpus.json`.
An English sentence is in dev or in training, in all languages alike: which one follows from a hash of its key (the
sentence without case, digits and punctuation), so no list of held-out sentences has to be kept in step.
"""

import concurrent.futures
import dataclasses
import gzip
import importlib.metadata
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.files import files
from lingvo_moe.core.runs.directories import CORPUS, check_replaceable
from lingvo_moe.tasks.text.corpus import clean, gettext_catalogs, split
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.file_list import CORPUS_LIST, FileList
from lingvo_moe.tasks.text.data.tidying import TIDIED, sentence_key

_DEV_SHARE = 0.08
MAX_SOURCES_PER_ENGLISH = 2
SENTENCE_WORDS = 3  # English texts of fewer words are labels and names


@dataclasses.dataclass(frozen=True)
class CorpusOptions:
    """Selects the languages, the packages and the number of pairs of a corpus."""

    # Languages to build; empty means every one with at least `min_pairs` pairs.
    langs: tuple[str, ...] = ()
    # Distributions whose gettext catalogs are read; "Babel" adds the CLDR.
    packages: tuple[str, ...] = ("Babel", *gettext_catalogs.PACKAGES)
    max_per_language: int = 12_000  # training pairs kept of each language, sentences first
    max_dev_per_language: int = 100  # dev pairs kept of each language, sentences first
    min_pairs: int = 2_500  # fewer training pairs than this leave a language out


@dataclasses.dataclass(frozen=True)
class Pair:
    """A cleaned pair and the package that it came from."""

    source: str
    english: str
    origin: str

    def line(self) -> str:
        return f"{self.source}\t{self.english}\t{self.origin}\n"


@dataclasses.dataclass(frozen=True)
class Built:
    """Counts of a corpus that was built."""

    languages: dict[str, tuple[int, int]]  # by language: training pairs, dev pairs
    english_sides: int  # different English sides of all languages' training pairs


def build_corpus(
    output: str | os.PathLike,
    options: CorpusOptions | None = None,
    progress: Callable[[str, int, int], None] = lambda lang, train, dev: None,
) -> Built:
    """Writes a corpus atomically, and counts what it holds.

    An older corpus in `output` is replaced; `progress` is called after each language that was kept.

    Raises:
        DataError: a package is missing, a language is unknown or has too few pairs.
        OutputError: `output` holds other files, or lies inside a run, data or a model.
    """
    options = options or CorpusOptions()
    output = Path(output)
    check_replaceable(output, CORPUS)
    catalogs = _catalogs_by_language(options.packages)
    languages = _languages(options, catalogs)
    counts: dict[str, tuple[int, int]] = {}
    english: set[int] = set()
    with files.replaced_directory(output) as temp:
        (temp / "dev").mkdir()
        jobs = [(lang, options, catalogs.get(lang, []), temp) for lang in languages]
        for lang, (train, dev, sides) in zip(languages, _map(_build_language, jobs)):
            if train:
                counts[lang] = (train, dev)
                english |= sides
                progress(lang, train, dev)
        if not counts:
            raise DataError(
                f"no language has {options.min_pairs} pairs in {', '.join(options.packages)}"
            )
        built = Built(counts, len(english))
        _write_summary(temp, options, built)
        CORPUS_LIST.Write(temp)
    return built


def languages_asked_for(corpus: str | os.PathLike) -> tuple[str, ...]:
    """CorpusOptions.langs, sorted, of a corpus that was built; () for all languages.

    Raises DataError: there is no such corpus, or its list of files or its summary is damaged.
    """
    FileList.Open(corpus)
    path = Path(corpus) / CORPUS_LIST.summary
    try:
        summary = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise DataError(
            f"{path}: missing or damaged: {e}; delete {corpus} to build it again"
        ) from e
    return tuple(summary.get("asked_for", ()))


def _map(function: Callable, jobs: Sequence[tuple]) -> Iterator:
    """Results in order, from as many processes as there are cores when there is enough to do."""
    workers = min(os.cpu_count() or 1, len(jobs) // 4, 8)
    if workers < 2:
        yield from map(function, jobs)
        return
    # spawn: a fork of a process that runs threads (TensorFlow's, in a test) can hang
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            yield from pool.map(function, jobs)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _build_language(
    job: tuple[str, CorpusOptions, list[tuple[str, Path]], Path],
) -> tuple[int, int, set[int]]:
    """Writes one language's files into a directory, unless it has too few pairs.

    Returns how many training and dev pairs they hold, and hashes of the training pairs' English sides.
    """
    lang, options, catalogs, directory = job
    train, dev = _split(lang, _collect(lang, options, catalogs), options)
    if len(train) < options.min_pairs and not options.langs:
        return 0, 0, set()
    if not train or not dev:
        raise DataError(
            f"language {lang!r}: only {len(train)} training and {len(dev)} dev pairs in "
            f"{', '.join(options.packages)}; leave it out of --languages"
        )
    _write(directory / f"{lang}.tsv.gz", train)
    _write(directory / "dev" / f"{lang}.tsv.gz", dev)
    return len(train), len(dev), {split.text_hash(pair.english) for pair in train}


def _catalogs_by_language(packages: Sequence[str]) -> dict[str, list[tuple[str, Path]]]:
    out: dict[str, list[tuple[str, Path]]] = {}
    for package in packages:
        if package.lower() == "babel":
            continue
        for lang, path in gettext_catalogs.catalogs(package):
            out.setdefault(lang, []).append((package, path))
    return out


def _languages(options: CorpusOptions, catalogs: dict[str, list]) -> list[str]:
    available = set(catalogs)
    if any(p.lower() == "babel" for p in options.packages):
        from lingvo_moe.tasks.text.corpus import cldr

        available.update(cldr.cldr_languages())
    for lang in options.langs:
        if lang not in available:
            raise DataError(
                f"--languages: no translations from {lang!r}{did_you_mean(lang, available)};"
                " languages are codes such as de or sw"
            )
    return sorted(set(options.langs) or available)


def _collect(lang: str, options: CorpusOptions, catalogs: list[tuple[str, Path]]) -> Iterator[Pair]:
    """The cleaned, usable pairs of a language: sentences from catalogs first, then names and phrases."""
    raw: list[tuple[str, Iterator[tuple[str, str]]]] = [
        (package, gettext_catalogs.catalog_pairs(path)) for package, path in catalogs
    ]
    if any(p.lower() == "babel" for p in options.packages):
        from lingvo_moe.tasks.text.corpus import cldr

        raw.append(("Babel", cldr.cldr_pairs(lang)))
    for origin, pairs in raw:
        for source, english in pairs:
            source, english = clean.clean_text(source), clean.clean_text(english)
            if clean.usable(lang, source, english):
                yield Pair(source, english, origin)


def _split(
    lang: str, pairs: Iterator[Pair], options: CorpusOptions
) -> tuple[list[Pair], list[Pair]]:
    """Deduplicates, splits, keeps sentences first, and shuffles (by hash, so always alike)."""
    sources: set[str] = set()
    englishes: dict[str, int] = {}
    keys: set[str] = set()
    train: list[tuple[int, int, Pair]] = []
    dev: dict[str, tuple[int, int, Pair]] = {}
    for pair in pairs:
        source, english = pair.source.casefold(), pair.english.casefold()
        if source in sources or englishes.get(english, 0) >= MAX_SOURCES_PER_ENGLISH:
            continue
        sources.add(source)
        englishes[english] = englishes.get(english, 0) + 1
        key = sentence_key(pair.english)
        # Drawn by a hash that the language is part of: languages keep different sentences.
        place = _rank(pair, key, key in keys), split.text_hash(f"{lang}\t{pair.line()}"), pair
        keys.add(key)
        if split.is_held_out(key, _DEV_SHARE):
            # One dev pair per sentence: "in 2 days" beside "in 5 days" would measure the same twice.
            dev.setdefault(key, place)
        else:
            train.append(place)

    def first(part: Iterable[tuple[int, int, Pair]], most: int) -> list[Pair]:
        chosen = sorted(part, key=lambda place: place[:2])[:most]
        return [pair for *_, pair in sorted(chosen, key=lambda place: place[1])]

    return first(train, options.max_per_language), first(dev.values(), options.max_dev_per_language)


def _rank(pair: Pair, key: str, again: bool) -> int:
    """0 for sentences, 1 for labels and texts that differ from earlier ones in digits alone, 2 for CLDR's names."""
    if pair.origin == "Babel":
        return 2
    return int(again or key.count(" ") + 1 < SENTENCE_WORDS)


def _write(path: Path, pairs: list[Pair]) -> None:
    with files.open_to_write(path) as raw:
        # No name and no time in the header: the same corpus is the same bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as file:
            file.write("".join(pair.line() for pair in pairs).encode("utf-8"))


def _write_summary(temp: Path, options: CorpusOptions, built: Built) -> None:
    versions = {package: importlib.metadata.version(package) for package in options.packages}
    languages = {
        lang: {"train": train, "dev": dev} for lang, (train, dev) in built.languages.items()
    }
    asked_for = sorted(set(options.langs))
    summary = {
        "packages": versions,
        "languages": languages,
        "english_sides": built.english_sides,
        "asked_for": asked_for,
        "tidied": TIDIED,
        "list": CORPUS_LIST.name,
    }
    text = json.dumps(summary, indent=1, sort_keys=True) + "\n"
    files.write_atomic(temp / CORPUS_LIST.summary, text.encode())
