"""Random damages to files of the tools: an error that names the file, or a cache that is made again.

Seeds determine the damages (tests/damage.py). Reading a damaged file returns what it returned before, with a warning,
if the files are only a cache; otherwise it returns nothing, and the error names the file.
"""

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import damages

from lingvo_moe.tasks.mt.decoding.shortlist import Shortlist
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.mt.quality import scoring
from lingvo_moe.tasks.mt.quality.baselines import add_baselines, read_baselines
from lingvo_moe.tasks.mt.quality.kept_translations import KeptTranslations
from lingvo_moe.tasks.text.batches.records import Records, cached_records
from lingvo_moe.tasks.text.corpus.corpus import CorpusOptions, build_corpus, languages_asked_for
from lingvo_moe.tasks.text.data.dev_set import DevSet
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.scan import scan
from lingvo_moe.tasks.text.preparing import prepare as preparing
from lingvo_moe.tasks.text.vocabulary.vocab_cache import (
    VocabOptions,
    cached_vocabularies,
    sample_pairs,
)
from tools import train_vocab

_SIZES = (320, 300)
_WORDS = ["".join(parts) for parts in itertools.product("bdfglmnrst", "aeiou", "kpvw", "aü")]


@dataclasses.dataclass
class Kept:
    """Files, and what reads them.

    Attributes:
        directory: all that is in it is damaged, hidden files of locks aside.
        Read: reads all of it; what comes back can be compared.
        is_cache: whether it is made again when it is damaged.
    """

    directory: Path
    Read: Callable[[], Any]
    is_cache: bool = False


def _corpus(directory: Path) -> Path:
    """Writes two languages of plain text, uncompressed."""
    rng = np.random.default_rng(0)
    directory.mkdir(parents=True)
    for lang in ("de", "sw"):
        lines = []
        for _ in range(150):
            words = rng.choice(_WORDS, rng.integers(2, 7))
            lines.append(f"{' '.join(words)} {lang}\t{' '.join(w[::-1] for w in words)}\n")
        (directory / f"{lang}.tsv").write_text("".join(lines), "utf-8")
    return directory


def _all_pairs(directory: Path) -> Any:
    return sample_pairs(scan(directory), 5.0, 10**6), dict(DevSet(directory).items())


def _all_records(records: Records) -> Any:
    return [
        [ids.tolist() for ids in records.Read(i, position)]
        for i, count in enumerate(records.languages.values())
        for position in range(count)
    ]


def _cached_vocabularies(tmp: Path) -> Kept:
    found = scan(_corpus(tmp / "corpus"))

    def read() -> Any:
        vocabs = cached_vocabularies(found, VocabOptions(*_SIZES), tmp / "cache")
        return [vocab.model_bytes for _, vocab in sorted(vocabs.items())]

    return Kept(tmp / "cache", read, is_cache=True)


def _cached_records(tmp: Path) -> Kept:
    found = scan(_corpus(tmp / "corpus"))
    vocabs = cached_vocabularies(found, VocabOptions(*_SIZES), tmp / "vocabs")
    return Kept(
        tmp / "cache",
        lambda: _all_records(cached_records(found, vocabs, tmp / "cache", pairs_per_shard=40)),
        is_cache=True,
    )


def _options() -> preparing.PrepareOptions:
    return preparing.PrepareOptions(VocabOptions(*_SIZES), pairs_per_shard=40, dev_share=0.1)


def _prepared(tmp: Path) -> Kept:
    data = tmp / "data"
    preparing.prepare([_corpus(tmp / "corpus")], data, _options())

    def read() -> Any:
        params = MtInput.Params().Set(data_dir=str(data), cache_dir=str(tmp / "unused"))
        params.Set(source_vocab_size=_SIZES[0], target_vocab_size=_SIZES[1])
        inputs = params.Instantiate().Prepare()
        models = [inputs.vocabs[side].model_bytes for side in ("source", "target")]
        return models, _all_records(inputs.records), _all_pairs(data)

    return Kept(data, read)


def _stopped_preparation(tmp: Path) -> Kept:
    """Files from which tools.prepare goes on; Read lets it go on, and stops it again at the very end."""
    corpus, output = _corpus(tmp / "corpus"), tmp / "data"
    numbers = itertools.count()

    class Stopped(Exception):
        pass

    class Preparation(preparing._Preparation):
        def _Assemble(self, output: Path, *args: Any) -> None:
            self.made = tmp / f"made-{next(numbers)}"
            super()._Assemble(self.made, *args)
            raise Stopped(self.made)

    def read() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preparing, "_Preparation", Preparation)
            with pytest.raises(Stopped) as stopped:
                preparing.prepare([corpus], output, _options())
        (made,) = stopped.value.args
        return {
            str(path.relative_to(made)): path.read_bytes()
            for path in sorted(made.rglob("*"))
            if path.is_file() and not path.name.startswith("prepared.")  # has the time in it
        }

    return Kept(tmp / ".data.preparing", read, is_cache=True)


def _vocab_dir(tmp: Path) -> Kept:
    corpus = _corpus(tmp / "corpus")
    flags = [f"--{side}_size={size}" for side, size in zip(("source", "target"), _SIZES)]
    assert train_vocab.main([f"--data_dir={corpus}", f"--output={tmp / 'vocab'}", *flags]) == 0

    def read() -> Any:
        params = MtInput.Params().Set(data_dir=str(corpus), cache_dir=str(tmp / "cache"))
        params.Set(source_vocab_size=_SIZES[0], target_vocab_size=_SIZES[1])
        vocabs = params.Set(vocab_dir=str(tmp / "vocab")).Instantiate().Prepare().vocabs
        return [vocabs[side].model_bytes for side in ("source", "target")]

    return Kept(tmp / "vocab", read)


def _built_corpus(tmp: Path) -> Kept:
    build_corpus(tmp / "built", CorpusOptions(("de", "sw"), ("Babel",), 60, 20))
    return Kept(
        tmp / "built", lambda: (_all_pairs(tmp / "built"), languages_asked_for(tmp / "built"))
    )


def _kept_translations(tmp: Path) -> Kept:
    batches = [[f"{word} {i}" for word in _WORDS[:9]] for i in range(3)]

    def shout(lines: list[str], langs: list[str]) -> list[str]:
        return [line.upper() for line in lines]

    def read() -> Any:
        kept = KeptTranslations(shout, tmp / "kept", {"step": 3})
        return [kept(lines, ["de"] * len(lines)) for lines in batches]

    return Kept(tmp / "kept", read, is_cache=True)


def _scores(tmp: Path) -> Kept:
    pairs = {"de": [(f"rot {i}", f"red {i}") for i in range(20)], "sw": [("kijani", "green")]}

    def report() -> scoring.EvalReport:
        return scoring.evaluate(lambda lines, langs: [f"{x}!" for x in lines], pairs.items())

    report().Write(tmp / "scores" / "de")
    for path in [*tmp.rglob("comet/*"), *tmp.rglob("*.ref")]:  # for other programs to read
        path.unlink()

    def read() -> Any:
        again = report()
        add_baselines(again, read_baselines(tmp / "scores", pairs.items()))
        texts = tmp / "scores" / "de" / "texts"
        translations, others = scoring.read_translations(texts, pairs.items())
        if others:  # which tools.evaluate says: they may be another system's
            raise ValueError(", ".join(f"{lang}.hyp" for lang in others))
        return again.ToDict()["languages"], translations

    return Kept(tmp / "scores", read)


@pytest.mark.parametrize("make, count", [
    (_cached_vocabularies, 4),
    (_cached_records, 8),
    (_prepared, 12),
    (_stopped_preparation, 8),
    (_vocab_dir, 8),
    (_built_corpus, 8),
    (_kept_translations, 8),
    (_scores, 8),
])  # fmt: skip
def test_no_damage_is_silent(make, count, tmp_path, caplog):
    kept = make(tmp_path)
    expected = kept.Read()
    files = [p for p in sorted(kept.directory.rglob("*")) if p.is_file() and p.stat().st_size]
    for damage in damages(files, count, seed=14):
        caplog.clear()
        damage.Apply()
        try:
            with caplog.at_level(logging.WARNING):
                found = kept.Read()
        except (ValueError, OSError) as e:
            told, found = str(e), None
        else:
            told = caplog.text
        finally:
            damage.Undo()
        if found is not None or kept.is_cache:
            assert found == expected, f"{damage}: {told}"
        damaged = [path for path in (damage.path, damage.other) if path]
        # A file that is missing from a cache is no error.
        is_gone = kept.is_cache and damage.kind == "delete"
        assert is_gone or any(path.name in told for path in damaged), f"{damage}: {told!r}"
    assert kept.Read() == expected


@pytest.mark.parametrize("start", [b"PK\x03\x04junk", b"PK\x03\x04"])
def test_a_shortlist_of_junk_with_a_right_digest_is_refused(tmp_path, start):
    """Anybody who writes a file can compute its digest."""
    body = start + b"sha256 of the bytes before: "
    file = tmp_path / "shortlist.npz"
    file.write_bytes(body + hashlib.sha256(body).hexdigest().encode())
    with pytest.raises(DataError, match=rf"--shortlist={file} is not of this version"):
        Shortlist.Load(file)
