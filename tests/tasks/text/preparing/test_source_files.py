import re
from pathlib import Path

import pytest
from refusals import refuses

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.preparing.lines import Fields
from lingvo_moe.tasks.text.preparing.source_files import find_sources


def _touch(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return directory


def test_files_of_every_form_are_found(tmp_path):
    _touch(
        tmp_path / "a", "de.tsv.gz", "zh-TW.jsonl.zst", "all pairs.jsonl", "README", "LICENSE.txt"
    )
    _touch(tmp_path / "a", "Europarl.de-en.de", "Europarl.de-en.en", "x.sw.gz", "x.fr", "x.en.zst")
    _touch(tmp_path / "a", "dev/de.tsv", ".hidden", "corpus.json")
    _touch(tmp_path / "b", "more/de.tsv", "sw.tsv")
    found = find_sources([tmp_path / "a", tmp_path / "b"], Fields())
    assert {(s.form, Path(s.path).name, s.lang) for s in found.train} == {
        ("tsv", "de.tsv.gz", "de"),
        ("jsonl", "zh-TW.jsonl.zst", "zh-TW"),
        ("jsonl", "all pairs.jsonl", None),
        ("lines", "Europarl.de-en.de", "de"),
        ("lines", "x.sw.gz", "sw"),
        ("lines", "x.fr", "fr"),
        ("tsv", "sw.tsv", "sw"),
    }
    assert [s.target for s in found.train if s.lang == "sw" and s.form == "lines"] == [
        str(tmp_path / "a" / "x.en.zst")
    ]
    assert [s.path for s in found.dev] == [str(tmp_path / "a" / "dev" / "de.tsv")]
    assert len(found.notes) == 1 and "more: a directory within an input" in found.notes[0]


def test_single_files_and_another_target_language(tmp_path):
    _touch(tmp_path, "x.de", "x.fr", "mixed.tsv")
    fields = Fields(columns=("lang", "_", "target", "source"), target_lang="fr")
    found = find_sources([tmp_path / "x.de", tmp_path / "mixed.tsv"], fields)
    assert [(s.form, s.lang) for s in found.train] == [("lines", "de"), ("tsv", None)]
    assert found.train[0].files == [tmp_path / "x.de", tmp_path / "x.fr"]


@refuses(DataError,
    ([], "no parallel text in .*: known are <lang>.tsv, .jsonl, .csv, .tmx, .parquet, .arrow and pairs <name>"),
    (["de.xml"], "de.xml: no known form of parallel text; known are .*; move it away"),
    (["de.jsonl", "de.tsv"], "both de.jsonl and de.tsv; keep one"),
    (["x.de", "x.en", "x.en.gz"], "both x.en and x.en.gz; keep one"),
    (["x.de", "x.fr"], "no file in the target language beside it: expected x.en .*--target_lang"),
    (["x.en", "y.en"], "x.en: no file of another language beside it, such as x.de"),
    (["english-german.tsv"], "is no code of a language; name the file such as de.tsv.*--columns=lang"),
)  # fmt: skip
def test_directories_of_no_use(names, tmp_path):
    _touch(tmp_path, *names)
    find_sources([tmp_path], Fields())


def test_inputs_that_are_not_there_or_there_twice(tmp_path):
    _touch(tmp_path, "de.tsv")
    with pytest.raises(DataError, match=re.escape(f"--input={tmp_path}/no does not exist")):
        find_sources([tmp_path / "no"], Fields())
    with pytest.raises(DataError, match="is given twice"):
        find_sources([tmp_path, f"{tmp_path}/../{tmp_path.name}"], Fields())
    with pytest.raises(DataError, match=r"de.tsv is given twice"):
        find_sources([tmp_path, tmp_path / "de.tsv"], Fields())


def test_columns_are_checked():
    with pytest.raises(DataError, match=r"--columns: no column 'sorce' .did you mean 'source'"):
        Fields(columns=("sorce", "target"))
    with pytest.raises(DataError, match="must name 'target' once"):
        Fields(columns=("source", "lang"))
