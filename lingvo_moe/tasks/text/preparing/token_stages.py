"""The third and fourth stages: the two vocabularies, and each language's pairs in their ids."""

import dataclasses
import gzip
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lingvo_moe.core.files import files
from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.file_list import write_listed
from lingvo_moe.tasks.text.data.made_once import make_once
from lingvo_moe.tasks.text.data.scan import Scan
from lingvo_moe.tasks.text.data.shards import LanguageShards, lengths_file, shard_file, write_shards
from lingvo_moe.tasks.text.preparing.language_stage import TRAIN
from lingvo_moe.tasks.text.vocabulary.vocab_cache import (
    NORMALIZATION,
    VocabOptions,
    cached_vocabulary,
    load_vocabularies,
    sample_pairs,
    train_side,
)
from lingvo_moe.tasks.text.vocabulary.vocabulary import VocabularyTooLarge

SUMMARY = "summary.json"
_TOGETHER = 500  # characters of a made sentence, with spaces less than that


@dataclasses.dataclass(frozen=True)
class VocabularyJob:
    """The job for one vocabulary."""

    side: str  # 'source' or 'target'
    scan: Scan  # the training files
    options: VocabOptions  # the options of both vocabularies
    # All that occur in the data, each of which becomes a piece (see train_vocabulary).
    characters: str
    output: str  # the file to write


def vocabulary_stage(job: VocabularyJob, report: Callable[[int], None]) -> str | VocabularyTooLarge:
    """Trains a vocabulary, unless that was done. Returns its file, or the error, so that the other side continues."""
    if cached_vocabulary(Path(job.output)) is None:
        options = job.options
        sentences = sample_pairs(job.scan, options.temperature, options.max_sentences)[job.side]
        missing = _missing(job.characters, sentences, NORMALIZATION[job.side])
        # Characters so rare that the sample has none are sentences of their own.
        at = range(0, len(missing), _TOGETHER)
        sentences += [" ".join(missing[i : i + _TOGETHER]) for i in at]
        try:
            model = train_side(sentences, job.side, options)
        except VocabularyTooLarge as e:
            return e
        write_listed(Path(job.output), model)
    report(1)
    return job.output


def _missing(characters: str, sentences: list[str], normalization: str) -> list[str]:
    if normalization == "nfkc":
        characters = unicodedata.normalize("NFKC", characters)
    left = set(characters)
    for sentence in sentences:
        if not sentence.isascii():
            left.difference_update(sentence)
    return sorted(c for c in left if not c.isspace())


@dataclasses.dataclass(frozen=True)
class RecordsJob:
    """The job for a block of a language's pairs."""

    lang: str  # its code
    directory: str  # its directory of the second stage
    start: int  # the byte of the training file at which the block begins
    block: int  # the pairs of a block; the last one has fewer
    vocab_dir: str  # the directory of both vocabularies
    pairs_per_shard: int  # the most that a shard holds
    output: str  # the directory to make

    def Pairs(self) -> Iterator[tuple[str, str]]:
        """The pairs of the block."""
        with open(Path(self.directory) / TRAIN, "rb") as raw:
            raw.seek(self.start)
            with gzip.GzipFile(fileobj=raw) as file:
                for line in itertools.islice(file, self.block):
                    _, pair = tsv.parse(line.decode())
                    if pair:
                        yield pair


def records_stage(job: RecordsJob, report: Callable[[int], None]) -> str:
    """Tokenises a block atomically, unless it was done before. Returns its directory.

    `report` is called with the number of pairs tokenised since the last call.

    Raises:
        OSError: the directory cannot be written.
    """

    def write(directory: Path) -> None:
        vocabs = load_vocabularies(job.vocab_dir)
        shards = write_shards(job.Pairs(), directory, job.lang, vocabs, job.pairs_per_shard, report)
        files.write_atomic(directory / SUMMARY, json.dumps(dataclasses.asdict(shards)).encode())

    return make_once(job.output, write)


def shards_of(directories: Iterable[str]) -> LanguageShards:
    """All shards of a language, from the summaries that records_stage wrote into the directories of its blocks."""
    total, dropped = LanguageShards(), Counter[str]()
    for directory in directories:
        block = LanguageShards(**json.loads((Path(directory) / SUMMARY).read_text()))
        total.records += block.records
        total.bytes += block.bytes
        total.source_tokens += block.source_tokens
        total.target_tokens += block.target_tokens
        dropped.update(block.dropped)
    total.dropped = dict(dropped)
    return total


def place_shards(lang: str, directories: Iterable[str], target: Path) -> None:
    """Puts the shards of a language's blocks, and the lengths of all, into a directory of records.

    Raises OSError: it cannot be written.
    """
    shard = itertools.count()
    for directory in directories:
        made = Path(directory)
        for i in range(len(shards_of([directory]).records)):
            files.link_or_copy(shard_file(made, lang, i), shard_file(target, lang, next(shard)))
        if (lengths := lengths_file(made, lang)).exists():
            files.append(lengths_file(target, lang), lengths.read_bytes())
