"""Pairs of CSV, Parquet, saved data sets of Hugging Face, and translation memories."""

import contextlib
import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet
import pytest

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.preparing.formats import read_source
from lingvo_moe.tasks.text.preparing.lines import Fields, Source
from lingvo_moe.tasks.text.preparing.prepare import PrepareOptions, prepare
from lingvo_moe.tasks.text.preparing.source_files import find_sources
from lingvo_moe.tasks.text.vocabulary.vocab_cache import VocabOptions

_PAIRS = [("Ein Haus, groß", "A house, large"), ('"Nein"\nsagte er', '"No"\nhe said')]
_TMX = """<?xml version="1.0" encoding="{encoding}"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd"{entities}>
<tmx version="1.4"><header srclang="de"/><body>
<tu><note>of no use</note>
<tuv xml:lang="DE-at"><seg>Ein <bpt i="1">&lt;b&gt;</bpt><hi>Haus</hi><ept i="1">&lt;/b&gt;</ept> &amp; mehr</seg></tuv>
<tuv xml:lang="en_US"><seg>A house &amp; more</seg></tuv>
<tuv xml:lang="fr"><seg>Une maison</seg></tuv></tu>
<tu><tuv xml:lang="de"><seg>allein</seg></tuv></tu>
</body></tmx>
"""


def _read(path, fields=None, lang=None):
    form = path.name.removesuffix(".gz").rpartition(".")[2]
    lines = read_source(Source(form, str(path), lang), fields or Fields())
    return [
        (line.lang, line.source, line.target) if not line.reason else line.reason for line in lines
    ]


def _table(items):
    return pa.Table.from_pylist(items)


def _save_arrow(path, items):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _table(items).schema) as out:
        out.write_table(_table(items))
    return path


@pytest.mark.parametrize("between", [",", ";", "\t"])
def test_csv(tmp_path, between):
    quoted = [between.join('"' + text.replace('"', '""') + '"' for text in pair) for pair in _PAIRS]
    path = tmp_path / "de.csv.gz"
    path.write_bytes(
        gzip.compress("\n".join(["source" + between + "target", *quoted, ""]).encode())
    )
    assert _read(path, lang="de") == [("de", *pair) for pair in _PAIRS]
    swapped = Fields(source=("target",), target=("source",))
    assert _read(path, swapped, "de") == [("de", *pair[::-1]) for pair in _PAIRS]


def test_a_header_may_name_the_languages(tmp_path):
    (tmp_path / "some pairs.csv").write_text("en,de\na house,ein Haus\nshort\n")
    assert _read(tmp_path / "some pairs.csv") == [("de", "ein Haus", "a house"), "no_field"]
    (tmp_path / "some pairs.csv").write_text("lang,source,target\nde,ein Haus,a house\n")
    assert _read(tmp_path / "some pairs.csv") == [("de", "ein Haus", "a house")]


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_missing_columns_are_said(tmp_path, form):
    path, item = (
        tmp_path / f"some pairs.{form}",
        {"id": "1", "text": "ein Haus", "english": "a house"},
    )
    if form == "csv":
        path.write_text("\n".join(map(",".join, (item, item.values()))))
    elif form == "parquet":
        pyarrow.parquet.write_table(_table([item]), path)
    else:
        _save_arrow(path, [item])
    with pytest.raises(
        DataError, match=r"its columns are 'id', 'text', 'english'; expected .*--json_fields"
    ):
        _read(path)
    named = Fields(source=("text",), target=("english",))
    assert _read(path, named, "de") == [("de", "ein Haus", "a house")]


def test_parquet_and_arrow(tmp_path):
    items = [{"translation": {"de": a, "en": b}, "url": "x"} for a, b in _PAIRS * 1500]
    pyarrow.parquet.write_table(_table(items), tmp_path / "some pairs.parquet")
    want = [("de", *pair) for pair in _PAIRS * 1500]
    assert _read(tmp_path / "some pairs.parquet") == want
    saved = _save_arrow(tmp_path / "train" / "data-00000-of-00001.arrow", items)
    assert _read(saved) == want
    data = saved.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        at = rng.randrange(len(data))
        saved.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        with contextlib.suppress(DataError):
            _read(saved)
    saved.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="damaged"):
        _read(saved)


def test_a_saved_data_set_is_an_input(tmp_path):
    for split in ("train", "validation"):
        items = [
            {"translation": {"de": f"Satz {split} {i}", "en": f"{split} {i}"}} for i in range(300)
        ]
        _save_arrow(tmp_path / "saved" / split / "data-00000-of-00001.arrow", items)
        (tmp_path / "saved" / split / "state.json").write_text("{}")
        (tmp_path / "saved" / split / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text(
        json.dumps({"splits": ["train", "validation"]})
    )
    # What the library leaves there is the same once more.
    _save_arrow(tmp_path / "saved" / "train" / "cache-0123456789abcdef.arrow", items)
    found = find_sources([tmp_path / "saved"], Fields())
    assert [(s.form, s.lang) for s in found.train + found.dev] == [("arrow", None)] * 2
    about = prepare([tmp_path / "saved"], tmp_path / "data", PrepareOptions(VocabOptions(285, 285)))
    assert (about["languages"]["de"]["kept"], about["languages"]["de"]["dev"]) == (300, 300)
    # Columns without a language have that of their directory.
    _save_arrow(tmp_path / "de" / "data-00000-of-00001.arrow", [{"source": "a", "target": "b"}])
    assert find_sources([tmp_path / "de"], Fields()).train[0].lang == "de"


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16", "ISO-8859-1"])
def test_tmx(tmp_path, encoding):
    path = tmp_path / "memory.tmx"
    path.write_bytes(_TMX.format(encoding=encoding, entities="").encode(encoding))
    text, english = "Ein Haus & mehr", "A house & more"
    assert _read(path) == [("de-at", text, english), ("fr", "Une maison", english), "no_field"]
    assert _read(path, lang="de") == [("de", text, english), "no_field"]
    assert _read(path, Fields(target_lang="fr"), "de") == [("de", text, "Une maison"), "no_field"]


def test_a_memory_has_no_entities_and_no_end_without_one(tmp_path):
    path = tmp_path / "memory.tmx"
    (tmp_path / "secret").write_text("secret")
    for entities in (
        f' [<!ENTITY x SYSTEM "{tmp_path}/secret">]',
        ' [<!ENTITY x "ha"><!ENTITY y "&x;&x;">]',
    ):
        text = _TMX.format(encoding="UTF-8", entities=entities).replace("A house", "A &x;")
        path.write_text(text)
        with pytest.raises(DataError, match=r"memory\.tmx:2: no TMX: declares the entity 'x'"):
            _read(path)
    path.write_text(_TMX.format(encoding="UTF-8", entities="")[:400])
    with pytest.raises(DataError, match=r"memory\.tmx:\d+: no TMX: "):
        _read(path)
    packed = tmp_path / "memory.tmx.gz"
    packed.write_bytes(gzip.compress(b"")[:10] + b"\xff" * 30)
    with pytest.raises(DataError, match=r"memory\.tmx\.gz:\d+: no TMX: "):
        _read(packed)
    long = _TMX.format(encoding="UTF-8", entities="").replace("A house", "A house " * 4000)
    path.write_text(long)
    assert _read(path)[0] == "too_long_line"
