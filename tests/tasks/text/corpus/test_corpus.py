import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from lingvo_moe.tasks.text.corpus import cldr, corpus, split
from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.dev_set import DevSet
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.tidying import sentence_key

LANGS = ("de", "sw", "zh")
OPTIONS = corpus.CorpusOptions(langs=LANGS, packages=("Babel", "Django"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("corpus") / "out"
    seen: list[str] = []
    counts = corpus.build_corpus(output, OPTIONS, lambda lang, train, dev: seen.append(lang))
    assert tuple(counts.languages) == tuple(seen) == LANGS
    assert all(train >= 1_500 and dev >= 50 for train, dev in counts.languages.values())
    english = {e for lang in LANGS for _, e in tsv.read_pairs(output / f"{lang}.tsv.gz")}
    assert counts.english_sides == len(english) > 3_000
    assert json.loads((output / "corpus.json").read_text())["english_sides"] == len(english)
    return output


def _files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_the_same_bytes_every_time(built, tmp_path):
    corpus.build_corpus(tmp_path / "again", OPTIONS)
    assert _files(tmp_path / "again") == _files(built)


def test_no_dev_english_is_in_training_in_any_language(built):
    train, dev = set(), set()
    for lang in LANGS:
        train |= {sentence_key(english) for _, english in tsv.read_pairs(built / f"{lang}.tsv.gz")}
    for _, pairs in DevSet(built).items():
        dev |= {sentence_key(english) for _, english in pairs}
    assert len(dev) > 100
    assert not dev & train


def test_pairs_are_clean_and_unique(built):
    for lang in LANGS:
        counts = Counter[str]()
        sources = [s.casefold() for s, _ in tsv.read_pairs(built / f"{lang}.tsv.gz", counts)]
        assert not tsv.skipped_of(counts)
        assert len(set(sources)) == len(sources)
    with gzip.open(built / "de.tsv.gz", "rt", encoding="utf-8") as file:
        columns = [line.rstrip("\n").split("\t") for line in file]
    assert {len(row) for row in columns} == {3}
    assert {row[2] for row in columns} == {"Babel", "Django"}


_SENTENCES = [f"Nobody has a {word} here." for word in ("cat", "dog", "fox", "hen", "owl", "pig")]


@pytest.mark.parametrize("most, kept", [
    (4, 4 * ["sentence"]),
    (6, 6 * ["sentence"]),
    (8, 6 * ["sentence"] + 2 * ["short"]),
    (9, 6 * ["sentence"] + 3 * ["short"]),
    (11, 6 * ["sentence"] + 3 * ["short"] + 2 * ["name"]),
    (99, 6 * ["sentence"] + 3 * ["short"] + 4 * ["name"]),
])  # fmt: skip
def test_sentences_are_kept_before_labels_and_these_before_names(monkeypatch, most, kept):
    """A text that differs in its case, digits or punctuation from one before it is no other sentence."""
    monkeypatch.setattr(split, "is_held_out", lambda key, share: False)
    programs = ["Open", "Save as", *_SENTENCES, "nobody has a CAT here, 5"]
    names = ["Central European Time", "May", "Seychellois Rupee", "On Monday, 5 May"]
    kinds = dict.fromkeys(programs, "short") | dict.fromkeys(_SENTENCES, "sentence")
    kinds |= dict.fromkeys(names, "name")
    pairs = [corpus.Pair(f"<{text}>", text, "Django") for text in programs]
    pairs += [corpus.Pair(f"<{text}>", text, "Babel") for text in names]
    chosen = {}
    for lang in ("de", "sw"):
        options = corpus.CorpusOptions(max_per_language=most)
        train, dev = corpus._split(lang, iter(pairs), options)
        assert sorted(kinds[pair.english] for pair in train) == sorted(kept)
        assert not dev
        assert corpus._split(lang, iter(pairs), options) == (train, dev)
        chosen[lang] = {pair.english for pair in train}
    # Of more sentences than they keep, languages keep different ones.
    assert (chosen["de"] == chosen["sw"]) == (most in (6, 9, 99))


def test_held_out_pairs_are_sentences_first_too(monkeypatch):
    monkeypatch.setattr(split, "is_held_out", lambda key, share: True)
    texts = ["Open", *_SENTENCES, "Nobody has a cat here!"]
    pairs = [corpus.Pair("Seychellen-Rupie", "Seychellois Rupee", "Babel")]
    pairs += [corpus.Pair(f"<{text}>", text, "Django") for text in texts]
    for most, others in ((6, set()), (7, {"Open"}), (9, {"Open", "Seychellois Rupee"})):
        options = corpus.CorpusOptions(max_dev_per_language=most)
        train, dev = corpus._split("de", iter(pairs), options)
        assert {pair.english for pair in dev} == {*_SENTENCES, *others} and not train


def test_cldr_gives_names_and_phrases_in_the_language():
    german = dict(cldr.cldr_pairs("de"))
    assert german["Frankreich"] == "France"
    assert german["Deutsch"] == "German"
    assert any(english.endswith(" days ago") for english in german.values())
    assert sum(" and " in english for english in german.values()) > 100
    assert list(cldr.cldr_pairs("xx")) == []
    # A language without words of its own for dates must not give English or the root's "M01".
    assert all(
        "M0" not in source for lang in ("lkt", "nd", "gv") for source, _ in cldr.cldr_pairs(lang)
    )


def test_a_language_has_no_dates_of_another_that_it_inherits_from():
    """Nor does it matter which languages this process has read before."""
    haitian = dict(cldr.cldr_pairs("ht"))
    assert len(haitian) > 2_500
    assert list(cldr.cldr_pairs("fr"))
    assert dict(cldr.cldr_pairs("ht")) == haitian
    assert not [source for source in haitian if "avril" in source or "vendredi" in source]


def test_an_interrupted_build_leaves_the_old_corpus(built, monkeypatch):
    before = _files(built)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpus.build_corpus(built, corpus.CorpusOptions(("sw",), ("Django",)), stop)
    assert _files(built) == before
    assert list(built.parent.iterdir()) == [built]


def test_a_language_with_little_data_is_left_out_unless_asked_for(tmp_path):
    with pytest.raises(DataError, match="no language has 100000 pairs in WTForms"):
        corpus.build_corpus(
            tmp_path / "out", corpus.CorpusOptions(packages=("WTForms",), min_pairs=100_000)
        )
    asked = corpus.CorpusOptions(langs=("sw",), packages=("Django",), min_pairs=100_000)
    assert set(corpus.build_corpus(tmp_path / "out", asked).languages) == {"sw"}
