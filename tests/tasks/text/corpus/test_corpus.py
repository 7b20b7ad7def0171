import gzip
from collections import Counter
from pathlib import Path

import pytest

from lingvo_moe.tasks.text.corpus import cldr, corpus
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
    assert tuple(counts) == tuple(seen) == LANGS
    assert all(train >= 1_500 and dev >= 50 for train, dev in counts.values())
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
    assert set(corpus.build_corpus(tmp_path / "out", asked)) == {"sw"}
