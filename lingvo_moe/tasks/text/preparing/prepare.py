"""Makes a prepared data set from parallel text, in four stages; the results of each are kept until all are done.

read (a job a source) -> languages (a job a language: duplicates, held-out pairs) -> vocabularies -> records (a job a
block of a language). A job writes into a directory beside the output, named by the settings that it depends on. So
the same command resumes where it was stopped, and with other vocabulary sizes the text is not read again.
"""

import dataclasses
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_moe.core.files import files
from lingvo_moe.core.input.base_input import Progress, quiet
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.directories import PREPARED, check_replaceable
from lingvo_moe.tasks.text.batches.lengths import measure
from lingvo_moe.tasks.text.batches.records import Records, records_key, write_contents
from lingvo_moe.tasks.text.corpus import split
from lingvo_moe.tasks.text.data import prepared
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.file_list import PREPARED_LIST, list_of, write_listed
from lingvo_moe.tasks.text.data.made_once import clear_others, settings_key, work_directory
from lingvo_moe.tasks.text.data.mixing import temperature_weights
from lingvo_moe.tasks.text.data.scan import Scan
from lingvo_moe.tasks.text.data.shards import PAIRS_PER_SHARD
from lingvo_moe.tasks.text.data.sides import Side, swapped
from lingvo_moe.tasks.text.data.tidying import KEYS, TIDIED
from lingvo_moe.tasks.text.preparing import (
    language_stage as languages,
    read_stage as reading,
    token_stages as tokens,
)
from lingvo_moe.tasks.text.preparing.beam import BeamRunner
from lingvo_moe.tasks.text.preparing.filters import Rules
from lingvo_moe.tasks.text.preparing.lines import Fields, Source
from lingvo_moe.tasks.text.preparing.scripts import LATIN, scripts_of
from lingvo_moe.tasks.text.preparing.source_files import TextSources, find_sources
from lingvo_moe.tasks.text.preparing.table import all_languages
from lingvo_moe.tasks.text.preparing.workers import run_jobs
from lingvo_moe.tasks.text.vocabulary.vocab_cache import VocabOptions, load_vocabularies
from lingvo_moe.tasks.text.vocabulary.vocabulary import VocabularyTooLarge

_VERSION = 4  # change it when the same settings would give other data
_BLOCK = PAIRS_PER_SHARD  # the pairs of a language that a job tokenises, about
_SMALL = 2_000_000  # bytes that one process reads before others would have started
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Settings of tools.prepare: the sources it reads, and the vocabularies and shards it writes."""

    # Sizes of the vocabularies, the sample and its temperature, which is the table's T too.
    vocab: VocabOptions
    # `fields`, `rules`: what is read and kept.
    fields: Fields = dataclasses.field(default_factory=Fields)
    rules: Rules = dataclasses.field(default_factory=Rules)
    # Of sentences to hold out where no held-out pairs are given; see split.is_held_out. None: by the size of the
    # input, see split.share_for.
    dev_share: float | None = None
    max_dev: int = 1000  # the most held-out pairs a language, where they are drawn
    pairs_per_shard: int = PAIRS_PER_SHARD  # the most pairs in a shard
    workers: int = 1  # processes
    tfds: tuple[str, ...] = ()  # names of TFDS builders to read too
    beam: BeamRunner | None = None  # runs the jobs instead of processes of this machine
    # The source and target lengths of the experiment's rows, or those of the target alone, whose loss is reported;
    # none: not known.
    rows: tuple[int, ...] = ()


def prepare(
    inputs: Sequence[str | os.PathLike],
    output: str | os.PathLike,
    options: PrepareOptions,
    progress: Progress = quiet,
) -> dict[str, Any]:
    """Writes a prepared data set atomically. Returns the contents of its prepared.json.

    Args:
        inputs: files and directories of parallel text; see source_files.py.
        output: the directory to make. Older prepared data there is replaced; anything else is an error.

    Raises:
        DataError: an input is missing, damaged or of no known form, nothing is left of it, a vocabulary is too large
            for it, or a share is to be held out of inputs that have held-out pairs.
        OutputError: `output` holds other files, or lies inside a run, data or a model.
        OSError: a file cannot be written; it is named. The same command then resumes.
    """
    check_replaceable(output, PREPARED)
    output = Path(os.path.realpath(output))
    sources = find_sources(inputs, options.fields)
    if sources.dev and options.dev_share is not None:
        raise DataError(
            f"--dev_share={options.dev_share:g}: has no effect, since an input has pairs in dev/; leave it out"
        )
    sources.train += [Source("tfds", name, None) for name in options.tfds]
    for note in sources.notes:
        _log.warning("%s", note)
    with work_directory(output, "preparing") as work:
        summary = _Preparation(sources, work, options, _keys(output, options), progress).Run(output)
        files.clear_leftovers(output)  # of a run that was killed while it put all in place
    return summary


class _Preparation:
    """The stages, in order."""

    def __init__(
        self,
        sources: TextSources,
        work: Path,
        options: PrepareOptions,
        keys: int,
        progress: Progress,
    ):
        size = sum(path.stat().st_size for source in sources.train for path in source.files)
        self._workers = 1 if size < _SMALL else options.workers
        share = options.dev_share
        if share is None:
            share = split.LEAST_SHARE if options.tfds else split.share_for(size)
        self._sources, self._work, self._options, self._progress = sources, work, options, progress
        self._dev_share, self._keys = share, keys
        read = [
            *(_described(source) for source in sources.train + sources.dev),
            dataclasses.asdict(options.fields),
            dataclasses.asdict(options.rules),
            (share, options.max_dev, keys),
        ]
        # Whole shards: a job makes those of a block, and small ones are not worth a job each.
        self._block = options.pairs_per_shard * max(1, _BLOCK // options.pairs_per_shard)
        key = self._settings = {"read": settings_key([_VERSION, read])}
        key["firsts"] = key["read"]
        key["languages"] = settings_key([key["read"], self._block])
        vocab = options.vocab
        sizes = (vocab.source_size, vocab.target_size, vocab.temperature, vocab.max_sentences)
        key["vocab"] = settings_key([key["languages"], sizes, *vocab.symbols])
        key["records"] = settings_key([key["vocab"], options.pairs_per_shard])
        clear_others(work, *key.values())
        self._tables: dict[str, reading.LanguageCounts] = {}
        self._characters: dict[str, set[str]] = {"source": set(), "target": set()}
        self._given = reading.GivenHeldOut(keys)

    def Run(self, output: Path) -> dict[str, Any]:
        self._Read()
        directories = self._Languages()
        self._Vocabularies(directories)
        records = self._Records(directories)
        summary = self._Summary(directories, records)
        self._progress(f"writing {output}")
        self._Assemble(output, directories, records, summary)
        return summary

    def _Read(self) -> None:
        """Reads all sources, and adds up what was found."""
        place, options = self._Place("read"), self._options
        dev_keys = self._DevKeys(place)
        jobs = [
            reading.ReadJob(
                source,
                options.fields,
                options.rules,
                self._dev_share,
                dev_keys,
                str(place / f"{i:05d}"),
                self._keys,
            )
            for i, source in enumerate(self._sources.train)
        ]
        self._parts = self._Stage(reading.read_stage, jobs, "reading, {} of {} sources", "lines")
        summaries = [json.loads((Path(part) / reading.SUMMARY).read_text()) for part in self._parts]
        self._CheckSides([summary["words"] for summary in summaries])
        for summary in summaries:
            for warning in summary["warnings"]:
                _log.warning("%s", warning)
            for side, characters in summary["characters"].items():
                self._characters[side].update(characters)
            for lang, counts in summary["languages"].items():
                _add(self._tables.setdefault(lang, reading.LanguageCounts()), counts)

    def _CheckSides(self, words: Sequence[Sequence[Side]]) -> None:
        """Raises DataError where a source has its sides in each other's place, unless --any_script is given."""
        wrong = swapped(words, self._options.fields.target_lang)
        if wrong and self._options.rules.check_script:
            paths = ", ".join(self._sources.train[i].path for i in wrong)
            raise DataError(
                f"{paths}: source and target seem to be in each other's place, by their frequent words: swap them"
                " (--columns=target,source swaps them in all TSVs); --any_script reads them as they are"
            )

    def _Place(self, stage: str) -> Path:
        """The directory of a stage's results for these settings."""
        place = self._work / f"{stage}-{self._settings[stage]}"
        place.mkdir(exist_ok=True)
        return place

    def _DevKeys(self, place: Path) -> str | None:
        """The file of hashes of given held-out sentences; None where none are given."""
        if not self._sources.dev:
            return None
        self._progress("reading the held-out pairs")
        for source in self._sources.dev:
            self._given.Read(source, self._options.fields)
        for warning in self._given.warnings:
            _log.warning("%s", warning)
        path = place / "dev_keys"
        files.write_atomic(path, np.array(sorted(self._given.hashes), np.uint64).tobytes())
        return str(path)

    def _Languages(self) -> dict[str, str]:
        """Makes the training and held-out files; returns a directory for each language that has pairs."""
        place = self._Place("languages")
        langs = {lang for lang in self._tables if lang != reading.NO_LANGUAGE}
        langs |= self._given.sources.keys()
        jobs = [
            languages.LanguageJob(
                lang,
                tuple(self._parts),
                tuple(self._given.sources.get(lang, ())) if self._sources.dev else None,
                self._options.fields,
                self._options.max_dev,
                self._block,
                str(place / lang),
                keys=self._keys,
            )
            for lang in sorted(langs)
        ]
        if beam := self._options.beam:
            firsts = self._Place("firsts") / "found"
            self._progress("looking for duplicates")
            beam.KeepFirst({job.lang: job.Hashes() for job in jobs}, firsts)
            jobs = [dataclasses.replace(job, firsts=str(firsts / job.lang)) for job in jobs]
        made = self._Stage(
            languages.language_stage, jobs, "looking for duplicates, {} of {} languages"
        )
        return {job.lang: directory for job, directory in zip(jobs, made)}

    def _Vocabularies(self, directories: Mapping[str, str]) -> None:
        summaries = {lang: _summary(directory) for lang, directory in directories.items()}
        pairs = {lang: about["kept"] for lang, about in summaries.items() if about["kept"]}
        if not pairs:
            dropped = sum((c.dropped for c in self._tables.values()), Counter[str]())
            raise DataError(f"no pair is left of the input: {reading.explain(dropped)}")
        train = {lang: Path(directories[lang]) / languages.TRAIN for lang in pairs}
        digests = {lang: summaries[lang]["digest"] for lang in pairs}
        self._scan = Scan(train, pairs, {}, prepared.fingerprint(digests))
        place = self._Place("vocab")
        jobs = [
            tokens.VocabularyJob(
                side,
                self._scan,
                self._options.vocab,
                "".join(sorted(self._characters[side])),
                str(place / f"{side}.model"),
            )
            for side in (("target",) if self._options.fields.texts else ("target", "source"))
        ]
        made = self._Stage(
            tokens.vocabulary_stage, jobs, "training vocabularies, {} of {}", here=True
        )
        failed = {job.side: e for job, e in zip(jobs, made) if isinstance(e, VocabularyTooLarge)}
        if failed:
            raise self._options.vocab.TooLarge(failed)
        if self._options.fields.texts:  # a language model has one
            write_listed(place / "source.model", (place / "target.model").read_bytes())
        self._vocabs: NestedMap = load_vocabularies(place)

    def _Records(self, directories: Mapping[str, str]) -> dict[str, list[str]]:
        """Tokenises all blocks; returns the directories of those of each language."""
        place = self._Place("records")
        vocab_dir = str(self._Place("vocab"))
        jobs = [
            tokens.RecordsJob(
                lang,
                directories[lang],
                start,
                self._block,
                vocab_dir,
                self._options.pairs_per_shard,
                str(place / f"{lang}-{i:05d}"),
            )
            for lang in self._scan.pairs
            for i, start in enumerate(_summary(directories[lang])["blocks"])
        ]
        made: dict[str, list[str]] = {}
        doing = "tokenising, {} of {} blocks"
        for job, directory in zip(jobs, self._Stage(tokens.records_stage, jobs, doing, "pairs")):
            made.setdefault(job.lang, []).append(directory)
        return made

    def _Stage(
        self,
        function: Callable,
        jobs: Sequence[Any],
        doing: str,
        unit: str = "",
        here: bool = False,
    ) -> list[Any]:
        """Does the jobs of a stage; `here` says that Beam does not, whose jobs return no more than directories."""

        def show(done: int, count: int, seconds: float) -> None:
            rate = f"{count:,} {unit}, {count / max(seconds, 1e-9):,.0f} a second"
            so_far = rate if unit else f"{seconds:.0f} s so far"
            self._progress(f"{doing.format(done, len(jobs))}: {so_far}")

        if self._options.beam and not here:
            self._progress(doing.format(0, len(jobs)))
            return self._options.beam.Run(function, jobs)
        return run_jobs(function, jobs, self._workers, show)

    def _Summary(
        self, directories: Mapping[str, str], records: Mapping[str, Sequence[str]]
    ) -> dict[str, Any]:
        """The contents of prepared.json."""
        pairs, options = self._scan.pairs, self._options
        shares = {t: temperature_weights(pairs, t) for t in (1.0, options.vocab.temperature)}
        about: dict[str, dict[str, Any]] = {}
        for lang in sorted({*self._tables, *directories}):
            counts = self._tables.get(lang, reading.LanguageCounts())
            entry = _summary(directories[lang]) if lang in directories else {"kept": 0, "dev": 0}
            entry.pop("blocks", None)
            dropped = counts.dropped + Counter(duplicate=entry.pop("duplicates", 0))
            dropped["held_out"] -= 0 if self._sources.dev else entry["dev"]
            about[lang] = {"read": counts.read, **entry, "source_tokens": 0, "target_tokens": 0}
            about[lang]["pairs"] = entry["kept"]
            if lang in records:
                shards = tokens.shards_of(records[lang])
                dropped["no_tokens"] += sum(shards.dropped.values())
                about[lang]["kept"] -= dropped["no_tokens"]
                about[lang]["source_tokens"] = shards.source_tokens
                about[lang]["target_tokens"] = shards.target_tokens
                about[lang]["share_at_1"] = shares[1.0][lang]
                about[lang]["share"] = shares[options.vocab.temperature][lang]
            about[lang] |= {"dropped": dict(+dropped), "examples": counts.examples}
        return {
            "format": prepared.FORMAT,
            "tidied": TIDIED,
            "keys": self._keys,
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "inputs": [source.path for source in self._sources.train],
            "target_language": options.fields.target_lang,
            "temperature": options.vocab.temperature,
            "dev_share": None if self._sources.dev else self._dev_share,
            "vocabularies": {side: self._vocabs[side].size for side in ("source", "target")},
            "records": records_key(self._scan.fingerprint, self._vocabs),
            "languages": {lang: a for lang, a in about.items() if lang in records},
            "left_out": {lang: a for lang, a in about.items() if lang not in records},
        }

    def _Assemble(
        self,
        output: Path,
        directories: Mapping[str, str],
        records: Mapping[str, Sequence[str]],
        summary: dict[str, Any],
    ) -> None:
        with files.replaced_directory(output) as temp:
            for name in ("dev", "vocab", "records"):
                (temp / name).mkdir()
            if not any(about["dev"] for about in all_languages(summary).values()):
                (temp / "dev").rmdir()
                _log.warning("no pair is held out: give dev/ in an input, or a larger --dev_share")
            for lang, directory in directories.items():
                train, dev = (Path(directory) / name for name in (languages.TRAIN, languages.DEV))
                if train.exists():
                    files.link_or_copy(train, temp / f"{lang}.tsv.gz")
                if dev.exists():
                    files.link_or_copy(dev, temp / "dev" / f"{lang}.tsv.gz")
            for side in ("source", "target"):
                model = self._Place("vocab") / f"{side}.model"
                for path in (model, list_of(model)):
                    files.link_or_copy(path, temp / "vocab" / path.name)
            for lang, blocks in records.items():
                tokens.place_shards(lang, blocks, temp / "records")
            entries = {lang: tokens.shards_of(blocks) for lang, blocks in records.items()}
            write_contents(temp / "records", summary["records"], self._vocabs, entries)
            summary["row_lengths"] = self._RowLengths(Records(temp / "records", summary["records"]))
            text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
            files.write_atomic(temp / PREPARED_LIST.summary, text.encode())
            PREPARED_LIST.Write(temp)

    def _RowLengths(self, records: Records) -> dict[str, Any]:
        """The contents of prepared.json about the lengths of pairs in tokens."""
        rows = self._options.rows
        lengths = measure(records).LastSides(len(rows) or 2)
        enough = lengths.RowLengths()
        return {
            "percentiles": lengths.Percentiles(),
            "enough": enough,
            "kept_by_enough": 1 - lengths.Loss(enough).share,
            "loss": dataclasses.asdict(lengths.Loss(rows)) if rows else None,
        }


def _keys(output: Path, options: PrepareOptions) -> int:
    """The version of sentence_key to split by: that of the data that are replaced, so that these keep their split."""
    try:
        keys = json.loads((output / PREPARED_LIST.summary).read_bytes()).get("keys", 1)
    except (OSError, ValueError, AttributeError):
        return KEYS
    if keys == 1 and LATIN not in (scripts_of(options.fields.target_lang) or (LATIN,)):
        _log.warning(
            "%s was made by an earlier version, whose split is kept: words that differ in vowel signs alone, as in"
            " Hindi, are one to it; delete it first to split them as today",
            output,
        )
    return 1 if keys == 1 else KEYS


def _summary(directory: str) -> dict[str, Any]:
    return json.loads((Path(directory) / languages.SUMMARY).read_text())


def _described(source: Source) -> dict[str, Any]:
    """Identifies a source: the result changes when its files or options do."""
    stats = [(p.stat().st_size, p.stat().st_mtime_ns) for p in source.files]
    paths = [str(p.resolve()) for p in source.files]
    return {**dataclasses.asdict(source), "paths": paths, "stats": stats}


def _add(total: reading.LanguageCounts, counts: Mapping[str, Any]) -> None:
    total.read += counts["read"]
    total.kept += counts["kept"]
    total.dropped.update(counts["dropped"])
    for reason, examples in counts["examples"].items():
        shown = total.examples.setdefault(reason, [])
        shown.extend(examples[: reading.EXAMPLES - len(shown)])
