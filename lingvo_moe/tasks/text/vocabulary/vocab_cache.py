"""Trains the vocabularies of a corpus from a sample, and caches them under a hash of data and settings."""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lingvo_moe.core.files import files
from lingvo_moe.core.input.base_input import Progress, quiet
from lingvo_moe.core.input.permutation import permute
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.file_list import (
    list_of,
    verify_listed,
    verify_where_listed,
    write_listed,
)
from lingvo_moe.tasks.text.data.mixing import quotas
from lingvo_moe.tasks.text.data.scan import Scan
from lingvo_moe.tasks.text.vocabulary.vocabulary import (
    MIN_SIZE,
    Vocabulary,
    VocabularyTooLarge,
    train_vocabulary,
)

MIN_SENTENCES = 100
# The source is normalised (full-width Latin and the like are many spellings of one text); what is written stays as is.
# The target comes first: it is the quicker one.
NORMALIZATION = {"target": "identity", "source": "nfkc"}
_ALGORITHM = "2"  # change it when the same settings would give another model
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VocabOptions:
    """Settings of the two vocabularies that are trained."""

    # `source_size`, `target_size`: numbers of ids.
    source_size: int
    target_size: int
    temperature: float = 5.0  # the temperature of the sample, as in mixing
    max_sentences: int = 500_000  # the most pairs in the sample, which is held in memory
    name: str = "input.{side}_vocab_size"  # the name of the sizes in errors, with {side}
    # The flags that set sizes, by side; None: the name and the size.
    flags: Callable[[Mapping[str, int]], str] | None = None
    symbols: tuple[str, ...] = ()  # the symbols of both sides: see train_vocabulary

    def size(self, side: str) -> int:
        return self.source_size if side == "source" else self.target_size

    def TooLarge(self, sides: Mapping[str, VocabularyTooLarge]) -> DataError:
        """The error for all sides that are too large, which says at once what to set."""
        text = "; ".join(str(error) for error in sides.values())
        most = {side: error.most for side, error in sides.items()}
        if min(most.values()) < MIN_SIZE:
            return DataError(f"{text}; the smallest vocabulary has {MIN_SIZE}: give more data")
        settings = " ".join(f"{self.name.format(side=side)}={size}" for side, size in most.items())
        flags = self.flags(most) if self.flags else settings
        return DataError(f"{text}; give more data, or set {flags}")


def cached_vocabularies(
    scan: Scan, options: VocabOptions, cache_dir: str | os.PathLike, progress: Progress = quiet
) -> NestedMap:
    """NestedMap(source, target) of Vocabulary: from the cache, or trained and put there. Texts alone have one for both.

    One that is damaged in the cache is trained again, with a warning.

    Raises:
        DataError: see train_vocabulary; if both sizes are too large, the message names both.
        OSError: the cache cannot be written.
    """
    cache_dir = Path(cache_dir)
    paths = {side: cache_dir / _file_name(scan, options, side) for side in scan.sides}
    out, sample, too_large = NestedMap(), None, {}
    with files.only_one(cache_dir):
        for side, path in paths.items():
            vocabulary = cached_vocabulary(path)
            if vocabulary is None:
                if sample is None:
                    progress("sampling sentences for the vocabularies")
                    sample = sample_pairs(scan, options.temperature, options.max_sentences)
                progress(f"training the {side} vocabulary of {options.size(side)} pieces")
                try:
                    model = train_side(sample[side], side, options)
                except VocabularyTooLarge as e:
                    too_large[side] = e
                    continue
                write_listed(path, model)
                vocabulary = Vocabulary(model, path)
            out[side] = vocabulary
    if too_large:
        raise options.TooLarge(too_large)
    return NestedMap(out, source=out.get("source", out.target))


def cached_vocabulary(path: Path) -> Vocabulary | None:
    """A cached vocabulary; None if there is none, or, with a warning, if it is damaged."""
    if not path.exists() and not list_of(path).exists():
        return None
    try:
        verify_listed(path, "it is trained again")
        return Vocabulary.Load(path)
    except DataError as e:
        _log.warning("a vocabulary in the cache is damaged: %s", e)
        return None


def train_side(sentences: list[str], side: str, options: VocabOptions) -> bytes:
    """Trains the vocabulary of a side, 'source' or 'target', from sampled sentences. Raises as train_vocabulary."""
    return train_vocabulary(
        # Once each: the same English sentence comes with many languages.
        list(dict.fromkeys(sentences)),
        options.size(side),
        options.name.format(side=side),
        NORMALIZATION[side],
        options.symbols,
    )


def load_vocabularies(
    directory: str | os.PathLike, sides: Sequence[str] = tuple(NORMALIZATION)
) -> NestedMap:
    """NestedMap(source, target) of `source.model` and `target.model` in a directory, with their lists verified.

    If `sides` are the target alone, it stands for both. Models without a list are loaded, with a warning: other tools
    make them, too.

    Raises:
        DataError: one is missing, damaged or no vocabulary of this form.
    """
    out = NestedMap()
    for side in sides:
        path = Path(directory) / f"{side}.model"
        if path.exists() or list_of(path).exists():
            verify_where_listed(directory, list_of(path).name, [path.name], "tools.train_vocab")
        out[side] = Vocabulary.Load(path)
    return NestedMap(out, source=out.get("source", out.target))


def sample_pairs(scan: Scan, temperature: float, limit: int, seed: int = 0) -> dict[str, list[str]]:
    """`{"source": [...], "target": [...]}`: at most `limit` pairs, languages by temperature, evenly from each file."""
    sample: dict[str, list[str]] = {"source": [], "target": []}
    for lang, quota in quotas(scan.pairs, temperature, limit).items():
        n = scan.pairs[lang]
        chosen = set(permute(np.arange(min(quota, n)), n, "sample", seed, lang).tolist())
        for i, (source, english) in enumerate(scan.Pairs(lang)):
            if i in chosen:
                sample["source"].append(source)
                sample["target"].append(english)
    return sample


def _file_name(scan: Scan, options: VocabOptions, side: str) -> str:
    size = options.size(side)
    settings = (
        f"{_ALGORITHM} {scan.fingerprint} {size} {options.temperature} {options.max_sentences}"
        f"{options.symbols or ''}"
    )
    digest = hashlib.blake2b(f"{side} {settings}".encode(), digest_size=8).hexdigest()
    return f"{side}-{size}-{digest}.model"
