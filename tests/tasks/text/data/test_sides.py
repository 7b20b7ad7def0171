"""Sources and targets in each other's place, first lines that name columns, and hidden files."""

import random

import pytest

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.scan import scan
from lingvo_moe.tasks.text.data.sides import Words, swapped
from lingvo_moe.tasks.text.preparing.filters import Rules
from lingvo_moe.tasks.text.preparing.formats import read_source
from lingvo_moe.tasks.text.preparing.lines import Fields, Source
from lingvo_moe.tasks.text.preparing.prepare import PrepareOptions, prepare
from lingvo_moe.tasks.text.preparing.source_files import find_sources
from lingvo_moe.tasks.text.vocabulary.vocab_cache import VocabOptions

_ENGLISH = [
    "the",
    "house",
    "of",
    "king",
    "and",
    "your",
    "with",
    "tree",
    "not",
    "that",
    "one",
    "from",
]


def _sentence(lang: str, rng: random.Random) -> str:
    words = [word if lang == "en" else f"{lang}{word[::-1]}" for word in _ENGLISH]
    return " ".join(rng.choices(words, range(len(words), 0, -1), k=6))


def _pairs(lang: str, target: str = "en") -> list[tuple[str, str]]:
    rng = random.Random(lang)
    return [(_sentence(lang, rng), _sentence(target, rng)) for _ in range(400)]


def _shares(pairs):
    words = Words()
    for pair in pairs:
        words.Add(*pair)
    return words.Shares()


@pytest.mark.parametrize("target", ["en", "sw"])
def test_sides_in_each_other_s_place_are_noticed(target):
    files = [_pairs(lang, target) for lang in ("de", "fr", "es", "nl")]
    files[2] = [pair[::-1] for pair in files[2]]
    assert swapped([_shares(pairs) for pairs in files], target) == [2]
    files[2] = files[2][:5]  # too few words
    assert swapped([_shares(pairs) for pairs in files], target) == []
    alone = [_shares(pair[::-1] for pair in files[0])]
    assert swapped(alone, target) == ([0] if target == "en" else [])


def _write(path, pairs, first=()):
    path.write_text("".join(f"{line}\n" for line in [*first, *map("\t".join, pairs)]))


def test_a_swapped_file_is_refused_or_read_as_asked(tmp_path, caplog):
    texts = tmp_path / "texts"
    texts.mkdir()
    for lang in ("de", "fr"):
        _write(texts / f"{lang}.tsv", [pair[:: -1 if lang == "fr" else 1] for pair in _pairs(lang)])
    options = PrepareOptions(VocabOptions(290, 290))
    with pytest.raises(
        DataError, match=r"^\S+fr\.tsv: source and target seem .*--columns=target,source.*--any_"
    ):
        prepare([texts], tmp_path / "data", options)
    as_is = PrepareOptions(VocabOptions(290, 290), rules=Rules(check_script=False))
    assert set(prepare([texts], tmp_path / "data", as_is)["languages"]) == {"de", "fr"}
    scan(texts)
    (said,) = [r.getMessage() for r in caplog.records if "each other's place" in r.getMessage()]
    assert said.startswith(f"{texts / 'fr.tsv'}: ")


@pytest.mark.parametrize("first, columns", [
    ("source\ttarget", "source,target"),
    ("SRC\tEN", "source,target"),
    ("de\ten", "source,target"),
    ("id\tde\ten", "_,source,target"),
])  # fmt: skip
def test_a_first_line_that_names_the_columns_is_no_pair(tmp_path, first, columns):
    fields = Fields(columns=tuple(columns.split(",")))
    pad = "1\t" * first.count("id")
    _write(tmp_path / "de.tsv", [(f"{pad}Haus", "house")], [first])
    header, pair = read_source(Source("tsv", str(tmp_path / "de.tsv"), "de"), fields)
    assert (header.reason, pair.source, pair.target) == ("header", "Haus", "house")


def test_a_first_line_that_names_other_columns_is_refused(tmp_path):
    _write(tmp_path / "de.tsv", [("house", "Haus")], ["id\ten\tde\tscore"])
    source = Source("tsv", str(tmp_path / "de.tsv"), "de")
    with pytest.raises(
        DataError,
        match=r"de\.tsv:1: the first line names the columns id, en, de.*--columns=_,target",
    ):
        list(read_source(source, Fields()))
    _write(tmp_path / "de.tsv", [("Quelle", "source"), ("source", "target")], ["Quelle\tsource"])
    assert not [line for line in read_source(source, Fields()) if line.reason]


def test_hidden_files_are_no_data_and_are_named(tmp_path, caplog):
    for name in ("news.txt", "._news.txt", ".old.jsonl", ".DS_Store"):
        (tmp_path / name).write_text('{"text": "old"}\n' if "old" in name else "a text\n")
    found = scan(tmp_path, field="text")
    assert list(found.files) == ["news"]
    assert f"{tmp_path}: hidden files are not read: ._news.txt, .old.jsonl" in caplog.text
    (tmp_path / "news.txt").rename(tmp_path / "de.tsv")
    (note,) = find_sources([tmp_path], Fields()).notes
    assert note.endswith("hidden files are not read: ._news.txt, .old.jsonl")
