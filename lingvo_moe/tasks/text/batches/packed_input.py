"""PackedInput: from a data directory to an endless stream of packed batches that resumes exactly where it stopped.

Letters: B row of the batch, T time.

scan -> vocabularies -> records (once, cached); then order -> pack -> read. A batch is a function of the state alone.
Order and packing need the pairs' lengths alone, so every process of a job knows all rows and reads its own. (Grain was
measured first: its mixture of 80 languages takes 76 us a pair where this takes about 10, and its packing does not
resume bit for bit.)
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.files.paths import user_cache_dir
from lingvo_moe.core.input import base_input
from lingvo_moe.core.input.base_input import BaseInput, HeldOutBatch, Progress, quiet
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.held_out_batches import LanguagePairs, encoded, held_out_batches
from lingvo_moe.tasks.text.batches.lengths import Loss, measure
from lingvo_moe.tasks.text.batches.order import PairOrder
from lingvo_moe.tasks.text.batches.records import Records, cached_records, prepared_records
from lingvo_moe.tasks.text.batches.rows_of_pairs import Marks, Shape, Sized, fill_batch, to_batch
from lingvo_moe.tasks.text.data.dev_set import DevSet
from lingvo_moe.tasks.text.data.errors import DataError, NoDevSetError, OtherTextsError
from lingvo_moe.tasks.text.data.prepared import target_language
from lingvo_moe.tasks.text.data.resource_groups import GROUPS, resource_groups
from lingvo_moe.tasks.text.data.scan import Scan, scan
from lingvo_moe.tasks.text.data.tsv import reasons
from lingvo_moe.tasks.text.runs.artifacts import (
    language_codes_of,
    languages_of,
    target_language_of,
    task_numbers,
    text_artifacts,
    tidied_of,
    vocabs_of,
)
from lingvo_moe.tasks.text.runs.run_dir import artifacts_of_vocabularies
from lingvo_moe.tasks.text.vocabulary.language_codes import LanguageCodes
from lingvo_moe.tasks.text.vocabulary.vocab_cache import (
    MIN_SENTENCES,
    VocabOptions,
    cached_vocabularies,
    load_vocabularies,
)
from lingvo_moe.tasks.text.vocabulary.vocabulary import open_vocabulary

# After so many consecutive pairs that do not fit, none is assumed to fit.
_GIVE_UP_AFTER = 100_000
_SIDES = ("source", "target")
LENGTH = checks.Integer(2)  # of a row
_CACHE_REMEDY = "set input.cache_dir, or XDG_CACHE_HOME, to a directory that can be written"


class PackedInput(BaseInput):
    """Base of inputs whose rows hold pairs or, as a subclass says, something made of their target sides; see Params.

    Attributes, after Prepare():
        vocabs: NestedMap(source, target) of Vocabulary.
        languages: `{lang: pairs}`.
        target_language: its code, of prepared data or the run of `vocab_dir`; '' where it is not known.
        codes: the languages of a model between any; each file of the data is then of a direction of them.
        dropped: lines and pairs of the data that are not trained on, by reason; pairs longer than a row are not in it.
    """

    READS: ClassVar[tuple[str, ...]] = ("data_dir", "vocab_dir")
    ADDS_TO: ClassVar[tuple[str, ...]] = ("cache_dir",)
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("data_dir", "cache_dir")
    DATA: ClassVar[str]  # the files of a data directory
    # For what is trained on, and for its kinds.
    WORDS: ClassVar[tuple[str, str]] = ("pairs", "languages")
    VOCAB_SETTINGS: ClassVar[Mapping[str, str]]  # to set where a vocabulary is too large, by side
    TOO_LONG: ClassVar[tuple[str, ...]] = ("drop", "truncate")  # the default first
    ToBatch = staticmethod(to_batch)  # from what each row holds

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "data_dir",
            "",
            "A directory of <lang>.tsv.gz with lines source<TAB>english, or what tools.prepare made.",
        )
        p.Define(
            "cache_dir",
            "",
            "Where vocabularies and tokenised data are kept; empty: the user's cache directory.",
        )
        p.Define(
            "languages",
            [],
            "Languages to train on; empty: all that are in data_dir.",
            checks.ListOf(checks.TEXT, "a list of strings"),
        )
        p.Define(
            "vocab_dir",
            "",
            "source.model and target.model from tools.train_vocab, or RUN/vocab of another run; empty: those of "
            "prepared data, or trained from the data.",
        )
        p.Define("source_vocab_size", 64_000, "Ids of the source vocabulary.", checks.IDS)
        p.Define("target_vocab_size", 32_000, "Ids of the target vocabulary.", checks.IDS)
        p.Define(
            "vocab_sentences",
            500_000,
            "The most pairs that vocabularies are trained from.",
            checks.Integer(MIN_SENTENCES),
        )
        p.Define("target_length", 64, "T of the target; a pair needs its ids and eos.", LENGTH)
        p.Define("temperature", 5.0, "Languages are drawn by n^(1/temperature).", checks.POSITIVE)
        p.Define(
            "weights",
            {},
            "The weights by which languages, or corpora, are drawn, e.g. {'de': 1, 'de_mine': 3}; empty: by "
            "temperature.",
        )
        p.Define("seed", 1234, "The seed of the order of pairs.", checks.SEED)
        p.Define("pack", True, "Several pairs in a row; False: one.")
        p.Define(
            "too_long",
            cls.TOO_LONG[0],
            f"What to do with what is longer than a row: {' or '.join(cls.TOO_LONG)}.",
            checks.one_of(cls.TOO_LONG),
        )
        return p

    def __init__(self, params: InstantiableParams):
        """Touches no data."""
        super().__init__(params)
        self._row = tuple(params.Get(name) for name in self.BATCH_SIZES[1:])
        tasks = "task_ids" in params and params.task_ids
        self.shape = Shape(params.batch_size, self._row[0], self._row[-1], params.pack, tasks)
        self._records: Records | None = None
        self._vocabs: NestedMap | None = None
        self._about: list[tuple[Any, ...]] = []
        self.codes: LanguageCodes | None = None
        self._loss: Loss | None = None
        self.dropped: dict[str, int] = {}
        self.target_language = ""

    @classmethod
    def CheckSource(cls, params: HyperParams) -> None:
        if not params.data_dir:
            raise DataError(
                f"--data_dir is needed to train: a directory of {cls.DATA} "
                "(`python -m tools.build_corpus --output=corpus` makes one)"
            )

    @staticmethod
    def Whole(
        source: Sequence[int], target: Sequence[int], about: tuple[Any, ...], vocabs: NestedMap
    ) -> Any:
        """Makes of a pair of ids that fits, and of LanguagePairs[1], what a row holds."""
        return source, target, *about

    def Prepare(self, progress: Progress = quiet, artifacts: RunArtifacts | None = None) -> Self:
        """Reads the data once, trains vocabularies, tokenises; quick when the cache has it all. Returns self.

        Processes that share a cache directory take turns, and all but the first find the work done. Further calls do
        nothing.

        Args:
            progress: called with a line of text now and then; the last says what was kept and what was not.
            artifacts: the vocabularies and the languages by task id of a run that goes on; None to take the
                vocabularies of `vocab_dir`, of the cache, or new ones, and the languages of the data, sorted.

        Raises:
            DataError: the data is missing, empty, broken or damaged, a vocabulary is too large for it, a language is
                none of the tasks, or no direction of a model between any languages, or the cache directory cannot be
                used.
        """
        if self._records is not None:
            return self
        p = self.p
        self.CheckSource(p)
        tasks = languages_of(artifacts) if artifacts else None
        scanned = scan(p.data_dir, p.languages, progress, self._Field())
        # Vocabularies of another run come with what it knows of its texts.
        run = artifacts or artifacts_of_vocabularies(p.vocab_dir) or RunArtifacts()
        self.codes = language_codes_of(run) if "source_length" in p else None
        self._vocabs = self._find_vocabularies(scanned, progress, run)
        self._tidied = max(tidied_of(run), 0 if artifacts else scanned.tidied)
        for vocabulary in self._vocabs.values():
            vocabulary.tidied = self._tidied
        self.target_language = target_language(p.data_dir) or target_language_of(run)
        self._records = prepared_records(scanned, self._vocabs) or cached_records(
            scanned, self._vocabs, self._CacheDir(), progress
        )
        numbers = None
        if self.shape.task_ids:
            if tasks and (more := [name for name in self._records.languages if name not in tasks]):
                raise OtherTextsError(
                    f"{p.data_dir} has languages that the run did not begin with, and whose experts it lacks: "
                    f"{', '.join(more)}; leave them out (input.languages)"
                )
            numbers = task_numbers(list(self._records.languages), tasks)
        for i, lang in enumerate(self._records.languages):
            marks = (Marks(self._vocabs, self.codes, lang),) if self.codes else ()
            self._about.append((numbers[i] if numbers else None, *marks))
        dropped = Counter(scanned.skipped) + Counter(self._records.dropped)
        self.dropped = dict(dropped)
        skipped = f"{dropped.total():,} skipped ({reasons(dropped)})" if dropped else "none skipped"
        counts, (texts, languages) = self._records.languages, self.WORDS
        said = f"{sum(counts.values()):,} {texts} of {len(counts)} {languages}"
        progress(f"{said}, {skipped}{self._TooLong()}")
        return self

    def _TooLong(self) -> str:
        """The end of a line that counts the pairs longer than a row; '' if there are none."""
        lengths = measure(self.records)
        self._loss = lengths.Loss(self._row)
        if not self._loss.share:
            return ""
        about = "about " if lengths.is_sample else ""
        count = f"{about}{round(self._loss.share * lengths.pairs):,}"
        done = {"drop": "left out", "truncate": "truncated"}.get(self.p.too_long, "split")
        return f"; {count} ({self._loss.share:.1%}) are longer than a row and {done}"

    def Warnings(self) -> list[str]:
        """See BaseInput: whether more than 1% of the pairs are longer than a row."""
        return [str(self._loss)] if self._loss and self._loss.matters else []

    def CheckNewRun(self) -> None:
        """See BaseInput. Raises DataError: rows leave out more than nine in ten pairs."""
        if self.p.too_long == "drop" and self._loss and self._loss.share > 0.9:  # hardly on purpose
            raise DataError(f"{self._loss}; input.too_long=truncate would use their beginnings")

    def Artifacts(self) -> RunArtifacts:
        """See BaseInput: the vocabularies, and the languages by task id."""
        vocabs = self.vocabs.Transform(lambda vocabulary: vocabulary.model_bytes)
        languages = list(self.languages)
        return text_artifacts(vocabs, languages, self.target_language, self._tidied, self.codes)

    def _CacheDir(self) -> Path:
        try:
            return _usable(Path(self.p.cache_dir) if self.p.cache_dir else user_cache_dir())
        except RuntimeError as e:
            raise DataError(f"no cache directory: {e}; {_CACHE_REMEDY}") from e

    def _find_vocabularies(self, scanned: Scan, progress: Progress, run: RunArtifacts) -> NestedMap:
        p = self.p
        saved = vocabs_of(run) if run.files else None
        directory = p.vocab_dir or (scanned.prepared.vocab_dir if scanned.prepared else "")
        if saved is None and not directory:
            options = VocabOptions(
                source_size=p.source_vocab_size,
                target_size=p.target_vocab_size,
                temperature=p.temperature,
                max_sentences=p.vocab_sentences,
                flags=self._VocabFlags,
            )
            return cached_vocabularies(scanned, options, self._CacheDir(), progress)
        sides = scanned.sides if p.vocab_dir else _SIDES
        if saved is None:
            if scanned.prepared and not p.vocab_dir:
                scanned.prepared.VerifyVocabularies()
            vocabs = self._Load(directory, sides)
        else:
            paths = {side: p.vocab_dir and f"{p.vocab_dir}/{side}.model" for side in _SIDES}
            vocabs = NestedMap({side: open_vocabulary(saved[side], paths[side]) for side in _SIDES})
            if saved["source"] == saved["target"]:
                vocabs.source = vocabs.target
        self._check_sizes(vocabs, scanned)
        return vocabs

    def _Field(self) -> str | None:
        """The field of JSON with a text, where data may be texts alone; None: it must be pairs."""
        return None

    def _Load(self, directory: str | os.PathLike, sides: Sequence[str]) -> NestedMap:
        return load_vocabularies(directory, sides)

    @property
    def vocabs(self) -> NestedMap:
        self.Prepare()
        return self._vocabs  # type: ignore[return-value]

    @property
    def records(self) -> Records:
        self.Prepare()
        return self._records  # type: ignore[return-value]

    @property
    def languages(self) -> dict[str, int]:
        return dict(self.records.languages)

    @property
    def about(self) -> list[tuple[Any, ...]]:
        """The rest that rows need of each language, in the order of `languages`; see LanguagePairs."""
        self.Prepare()
        return self._about

    def __iter__(self) -> "PackedBatches":
        """Endless batches from the beginning; each call starts from the beginning."""
        return PackedBatches(self)

    def HeldOut(self) -> Iterator[HeldOutBatch]:
        """See BaseInput: the pairs of data_dir/dev, packed, of the languages that are trained on.

        Raises:
            NoDevSetError: there are none.
            DataError: they are damaged.
        """
        dev, trained = DevSet(self.p.data_dir, field=self._Field()), self.languages
        languages = [lang for lang in dev.languages if lang in trained]
        if not languages:
            raise NoDevSetError(
                f"{self.p.data_dir}/dev has {self.WORDS[0]} of {', '.join(dev.languages)}, but of none of the "
                f"{self.WORDS[1]} that are trained on: {', '.join(trained)}"
            )
        about = dict(zip(trained, self.about, strict=True))
        groups: dict[str, list[LanguagePairs]] = {name: [] for name in GROUPS}
        for lang, group in resource_groups({lang: trained[lang] for lang in languages}).items():
            groups[group].append((self._HeldOutPairs(dev[lang]), about[lang]))
        groups = {name: [item for item in items if item[0]] for name, items in groups.items()}
        return held_out_batches(groups, self._HeldOutSized, self.shape, self.ToBatch)

    def _HeldOutPairs(self, pairs: Sequence[tuple[str, str]]) -> Sequence[Any]:
        return pairs

    def _HeldOutSized(self, pair: Any, about: tuple[Any, ...]) -> Sized | None:
        """One of _HeldOutPairs for a row; None to leave it out."""
        encode = self.vocabs.source.Encode, self.vocabs.target.Encode
        return encoded(encode, self.shape, self.p.too_long == "truncate")(pair, about)

    def _VocabFlags(self, sizes: Mapping[str, int]) -> str:
        """The trainer's flag that sets these sizes of vocabularies, by side."""
        settings = (self.VOCAB_SETTINGS[side].format(most=size) for side, size in sizes.items())
        return f"--model_params_override='{';'.join(settings)}'"

    def _check_sizes(self, vocabs: NestedMap, scanned: Scan) -> None:
        wanted = {side: self.p.Get(f"{side}_vocab_size") for side in self.VOCAB_SETTINGS}
        wrong = {side: vocabs[side] for side, size in wanted.items() if vocabs[side].size != size}
        if not wrong:
            return
        mismatches = [
            f"{vocabulary.path or f'the {side} vocabulary of the run'} has {vocabulary.size} ids, but"
            f" {self.p.name}.{side}_vocab_size is {wanted[side]}"
            for side, vocabulary in wrong.items()
        ]
        remedy = f"set {self._VocabFlags({side: v.size for side, v in wrong.items()})}"
        prepared_dir = scanned.prepared.vocab_dir if scanned.prepared else None
        if all(v.path and prepared_dir in v.path.parents for v in wrong.values()):
            flags = " ".join(f"--{side}_vocab_size={wanted[side]}" for side in wrong)
            remedy += f", or run tools.prepare with {flags}"
        raise DataError(f"{'; '.join(mismatches)}: {remedy}")


class PackedBatches(base_input.BatchIterator):
    """Batches of packed pairs, without end; see BaseInput.

    Attributes:
        counts: pairs used, dropped and truncated for their length, and batches made so far.
    """

    def __init__(self, input_generator: PackedInput):
        self._input, self._shape = input_generator, input_generator.shape
        self._records = input_generator.records
        p = input_generator.p
        self._more = int(input_generator.codes is not None)  # codes on each side
        sizes, shards = self._Sizes()
        self._order = PairOrder(sizes, p.temperature, p.seed, shards, self._lengths, p.weights)
        self._waiting: list[Sized] = []  # with their places in the records: language, position
        self.counts = {"batches": 0, "pairs": 0, "too_long": 0}

    def __next__(self) -> NestedMap:
        """The next batch, of which `rows` are filled.

        Raises DataError: no pair fits into a row, or a damaged cache.
        """
        rows, self._waiting = fill_batch(self._shape, self._waiting, self._drawn())
        self.counts["batches"] += 1
        if self.rows is not None:
            rows = [row if i in self.rows else [] for i, row in enumerate(rows)]
        records = [[self._read(*place) for place in row] for row in rows]
        return self._input.ToBatch(records, self._shape)

    def _Sizes(self) -> tuple[Mapping[str, int], Mapping[str, Sequence[int]]]:
        """The numbers of pairs to draw from, of each language and of each of its shards."""
        return self._records.languages, self._records.shards

    def GetState(self) -> dict[str, Any]:
        """The position of the iterator: a dict for JSON, a few KB."""
        return {
            "identity": self._identity(),
            "order": self._order.GetState(),
            "waiting": [list(place) for _, _, place in self._waiting],
            "counts": dict(self.counts),
        }

    def SetState(self, state: Mapping[str, Any]) -> None:
        """Continues where `GetState` was called.

        Raises DataError: the state is of other data, another vocabulary, seed or temperature.
        """
        if set(state) != set(self.GetState()):
            raise DataError(f"not a saved position of the input: it holds {sorted(state)}")
        if state["identity"] != self._identity():
            raise OtherTextsError(
                "the saved position of the input is of other data: expected"
                f" {self._identity()}, saved {state['identity']}; go on with the data and the input"
                " parameters that the run began with"
            )
        self._order.SetState(state["order"])
        self._waiting = [self._waits(*place) for place in state["waiting"]]
        self.counts = dict(state["counts"])

    def _identity(self) -> dict[str, Any]:
        p = self._input.p
        about = {"records": self._records.key, "seed": p.seed, "temperature": p.temperature}
        return about | ({"weights": p.weights} if p.weights else {})

    def _lengths(self, language: int, positions: np.ndarray) -> np.ndarray:
        """The numbers of ids of pairs, with codes, before they are truncated: [N, 2] for positions [N]."""
        lengths = self._records.Lengths(language)[positions]
        return lengths + np.uint16(1) if self._more else lengths

    def _drawn(self) -> Iterator[Sized]:
        """The next pairs that fit, or are truncated."""
        truncates, left_out = self._input.p.too_long == "truncate", 0
        shape, counts = self._shape, self.counts
        for language, position, source, target in self._order:
            if not shape.Fits(source, target):
                counts["too_long"] += 1
                left_out += 1
                if truncates:
                    source, target = self._truncated(source, target)
                elif left_out < _GIVE_UP_AFTER:
                    continue
                else:
                    raise self._NoneFits()
            left_out = 0
            counts["pairs"] += 1
            yield source, target, (language, position)

    def _NoneFits(self) -> DataError:
        p = self._input.p
        rows = (f"{p.name}.{name}={p.Get(name)}" for name in self._input.BATCH_SIZES[1:])
        return DataError(
            f"none of {_GIVE_UP_AFTER:,} {self._input.WORDS[0]} fits into a row of {', '.join(rows)}; make it longer, "
            f"or set {p.name}.too_long=truncate"
        )

    def _truncated(self, source: int, target: int) -> tuple[int, int]:
        """The lengths of a pair in a row."""
        return min(source, self._shape.source_length - 1), min(
            target, self._shape.target_length - 1
        )

    def _waits(self, language: int, position: int) -> Sized:
        """A pair that was drawn before."""
        ((source, target),) = self._lengths(language, np.array([position])).tolist()
        return *self._truncated(source, target), (language, position)

    def _read(self, language: int, position: int) -> Any:
        """A pair's ids, truncated to a row's lengths, and its task, for ToBatch."""
        source, target = self._records.Read(language, position)
        shape, less = self._shape, 1 + self._more
        about = self._input.about[language]
        return source[: shape.source_length - less], target[: shape.target_length - less], *about


def _usable(cache_dir: Path) -> Path:
    """The directory, made if missing. Raises DataError if it cannot be made or written."""
    why = "no permission to write in it"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        if os.access(cache_dir, os.W_OK | os.X_OK):
            return cache_dir
    except OSError as e:
        why = str(e)
    raise DataError(f"cache directory {cache_dir} cannot be used: {why}; {_CACHE_REMEDY}")
