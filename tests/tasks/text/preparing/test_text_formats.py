import json
from pathlib import Path

import pytest

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.preparing.formats import read_source
from lingvo_moe.tasks.text.preparing.lines import Fields, ReadLine, Source


def _read(path: Path, text: str | bytes, fields: Fields | None = None, lang: str | None = "de"):
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    form = path.suffix[1:]
    return [
        tuple(line)[1:] if not line.reason else (line.number, line.reason)
        for line in read_source(Source(form, str(path), lang), fields or Fields())
    ]


def test_tsv_columns(tmp_path):
    text = "\ufeffHaus\thouse\tWeb\r\nohne\n\tleer\n"
    assert _read(tmp_path / "de.tsv", text) == [
        ("de", "Haus", "house", ""),
        (2, "no_tab"),
        ("de", "", "leer", ""),
    ]
    mixed = Fields(columns=("_", "target", "lang", "source"))
    text = b"1\thouse\tde\tHaus\n2\thouse\t../x\tHaus\n3\tmaison\n\xff\n4\thouse\tsw\tnyumba\n"
    assert _read(tmp_path / "all.tsv", text, mixed, None) == [
        ("de", "Haus", "house", ""),
        (2, "no_language"),
        (3, "no_tab"),
        (4, "invalid_utf8"),
        ("sw", "nyumba", "house", ""),
    ]


@pytest.mark.parametrize("item, lang, expected", [
    ({"source": "Haus", "target": "house"}, "de", [("de", "Haus", "house", "")]),
    ({"src": "Haus", "tgt": "house", "lang": "nds"}, "de", [("nds", "Haus", "house", "")]),
    ({"de": "Haus", "en": "house"}, "de", [("de", "Haus", "house", "")]),
    ({"translation": {"de": "Haus", "en": "house"}}, None, [("de", "Haus", "house", "")]),
    ({"translation": {"de": "Haus", "en": "house", "fr": "maison"}}, None,
     [("de", "Haus", "house", ""), ("fr", "maison", "house", "")]),
    ({"source": "Haus", "target": "house"}, None, [(1, "no_language")]),
    ({"source": "Haus", "target": None}, "de", [(1, "no_field")]),
    ({"source": "Haus"}, "de", [(1, "no_field")]),
    ({"source": "\ud83d", "target": "house"}, "de", [(1, "invalid_utf8")]),
    (["Haus", "house"], "de", [(1, "bad_json")]),
])  # fmt: skip
def test_json_objects(tmp_path, item, lang, expected):
    assert _read(tmp_path / "x.jsonl", json.dumps(item) + "\n", lang=lang) == expected


def test_json_that_is_none(tmp_path):
    text = '{"source": "a"\n' + "[" * 9000 + '\n\n{"s": "ja", "t": "yes"}\n'
    fields = Fields(source=("s",), target=("t",))
    assert _read(tmp_path / "de.jsonl", text, fields) == [
        (1, "bad_json"),
        (2, "bad_json"),
        (3, "bad_json"),
        ("de", "ja", "yes", ""),
    ]


def test_what_is_no_code_of_a_language_names_no_file(tmp_path):
    half = '{"source": "\\ud800", "target": "x", "lang": "../../x"}'
    (tmp_path / "all.jsonl").write_text('{"lang": "../../x"}\n' + half)
    lines = list(read_source(Source("jsonl", f"{tmp_path}/all.jsonl", None), Fields()))
    assert [(line.lang, line.reason) for line in lines] == [
        (None, "no_field"),
        (None, "invalid_utf8"),
    ]


def _two(tmp_path: Path, ours: str, theirs: str) -> list[ReadLine]:
    (tmp_path / "x.de").write_text(ours)
    (tmp_path / "x.en").write_text(theirs)
    return list(
        read_source(Source("lines", f"{tmp_path}/x.de", "de", f"{tmp_path}/x.en"), Fields())
    )


def test_two_files_line_by_line(tmp_path):
    lines = _two(tmp_path, "Haus\n\nBaum\n", "house\nempty\ntree")
    assert [(line.source, line.target) for line in lines] == [
        ("Haus", "house"),
        ("", "empty"),
        ("Baum", "tree"),
    ]


@pytest.mark.parametrize("ours, theirs", [(5, 3), (3, 5), (0, 1)])
def test_two_files_of_different_length(tmp_path, ours, theirs):
    message = rf"x.de has {ours} lines and .*x.en has {theirs}: the lines of a pair"
    with pytest.raises(DataError, match=message):
        _two(tmp_path, "a\n" * ours, "b\n" * theirs)
