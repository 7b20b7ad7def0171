"""Unusual lines: N lines in, N lines out, and the same text by every way.

The ways: Python, the SavedModel alone, tools.translate, tools.serve and tools.score.
"""

import base64
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf
import toy_translation as toy
from local_server import Running, running

from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.decoding.translator import Translator
from lingvo_moe.tasks.text.decoding.line_stream import Line, answer_stream, translation_of
from lingvo_moe.tasks.text.quality.forced_decoding import ScoreOptions, Scorer
from lingvo_moe.tasks.text.serving.limits import Limits
from tools import _lines, score, translate

_LONG = b"red " * 1_000_000
_MATRIX = {
    "nothing": b"",
    "empty": b"\n\n",
    "blank": b"   \n\t\nred\n",
    "no newline at the end": b"red\ngreen",
    "BOM": b"\xef\xbb\xbfred\ngreen\n",
    "BOM and no more": b"\xef\xbb\xbf",
    "NUL": b"\0\nred\0green\n",
    "not UTF-8": b"\xff\n\xfe\nred \xc3\n\xed\xa0\x80\n",
    "U+2028": "\u2028\nred\u2028green\n\u2029\x85\n".encode(),
    "CRLF": b"red\r\n\r\ngreen\r\n",
    "lone CR and friends": b"red\rgreen\n\x0b\x0c\x1c\n",
    "long": _LONG + b"\nred\n",
    "1,000 blank": b"\n" * 1000,
}
_WIDE = Limits(
    max_body_bytes=8 << 20, max_lines=20_000, max_line_chars=5_000_000, max_waiting_lines=20_000
)


@dataclass
class Toy:
    """A model with random but repeatable translations: in Python, and exported."""

    translator: Translator
    saved_model: Path
    opened: SavedTranslator
    texts: dict[str, bytes]

    def Text(self, name: str) -> bytes:
        """Returns the Translator's result for a text of the matrix, 32 lines at a time."""
        if name not in self.texts:
            self.texts[name] = in_python(self.translator, _MATRIX[name], 32)
        return self.texts[name]


def _count(data: bytes) -> int:
    """Counts lines: each newline ends one, and bytes after the last newline are one."""
    return data.count(b"\n") + (data != b"" and not data.endswith(b"\n"))


@pytest.fixture(scope="module")
def model(translator, saved_model, opened) -> Toy:
    return Toy(translator, saved_model, opened, {})


def in_python(translator: Translator | SavedTranslator, data: bytes, batch_lines: int) -> bytes:
    out = io.BytesIO()
    answer = translation_of(translator.Translate)
    answer_stream(answer, io.BytesIO(data), out, batch_lines, lambda _: None, lambda _: None)
    return out.getvalue()


@pytest.mark.parametrize("name", _MATRIX)
def test_lines_out_are_lines_in(name, model):
    """Readers that know newlines only, and those that know every line end, count the same lines."""
    data, out = _MATRIX[name], model.Text(name)
    assert out.count(b"\n") == data.count(b"\n")
    bom_alone = name == "BOM and no more"  # a line without text and without newline is no line
    assert len(out.decode().splitlines()) == _count(data) - bom_alone
    assert bool(out.strip()) == bool(re.search(b"red|\xff", data))


# --- the same text everywhere


@pytest.mark.parametrize("name", _MATRIX)
def test_the_saved_model_alone(name, model):
    """Its signature takes all lines at once. A reader of lines would remove a BOM, and CR before a newline."""
    data = _MATRIX[name].removeprefix(b"\xef\xbb\xbf")
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    translate_ = model.opened._loaded.signatures["predict"]
    out = translate_(text=tf.constant(lines))["translations"].numpy()
    assert b"\n".join(out[:, 0]) == model.Text(name)


@pytest.mark.parametrize("name", _MATRIX)
def test_tools_translate(name, model, monkeypatch, tmp_path, capfd):
    """A loaded model translates standard input in batches of another size."""
    data, out = _MATRIX[name], tmp_path / "out.txt"
    monkeypatch.setattr(translate._models, "open_translator", lambda args: (model.opened, {}))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    flags = [f"--saved_model={model.saved_model}", f"--output={out}", "--batch_size=7"]
    assert translate.main(flags) == 0
    err = capfd.readouterr().err
    assert out.read_bytes() == model.Text(name)
    lines = "1 line" if _count(data) == 1 else f"{_count(data)} lines"
    assert f"translate: {lines} in" in err
    assert ("line 1 is too long: its end is not translated" in err) == (name == "long")


@pytest.fixture(scope="module")
def server(model) -> Iterator[Running]:
    with running(model.opened, _WIDE, max_batch_lines=256) as it:
        yield it


@pytest.mark.parametrize("name", _MATRIX)
def test_tools_serve(name, model, server):
    """Lines arrive as one text, as bytes, by the dozen, and alone."""
    data = _MATRIX[name]
    want = model.Text(name).decode().split("\n")
    if name != "not UTF-8":
        assert server.Translate(data.decode()) == want
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    instances = [{"b64": base64.b64encode(line).decode()} for line in lines]
    path = "/v1/models/translator:predict"
    reply = server.Ask("POST", path, {"instances": instances}).content["predictions"]
    assert [row["translations"][0] for row in reply] == want
    assert reply[0]["truncated"] == (name == "long")
    for i in range(min(len(lines), 3)):
        (row,) = server.Ask("POST", path, {"instances": [instances[i]]}).content["predictions"]
        assert row == reply[i]


# --- tools that do more than translate


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> Scorer:
    path = tmp_path_factory.mktemp("run")
    toy.save_run(path, toy.train_vocab(toy.sentences(200)), more=toy.SMALL)
    return Scorer(path, ScoreOptions(max_source_length=8, max_length=8, rows=4))


@pytest.mark.parametrize("name", _MATRIX)
def test_tools_score(name, scorer, monkeypatch, tmp_path, capfd):
    """Lines with and without a target, in small and in large batches."""
    data = _MATRIX[name].replace(b"red", b"red\tgreen", 3)
    monkeypatch.setattr(score, "_open", lambda args: scorer)
    outputs = []
    for batch_lines in (7, 256):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        flags = [f"--output={tmp_path}/out", f"--batch_size={batch_lines}"]
        assert score.main(["--logdir=x", *flags]) == 0
        outputs.append((tmp_path / "out").read_text())
        err = capfd.readouterr().err
        assert ("line 1 is too long: its end is not scored" in err) == (name == "long")
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == data.count(b"\n")
    assert len(outputs[0].splitlines()) == _count(data)
    assert all(len(line.split("\t")) == 3 for line in outputs[0].splitlines())


@pytest.mark.parametrize("line, wrong", [
    (b"a", "a line must be an object"),
    (b'{"text": "a"}', "no string in field 'prompt'; strings are in 'text'"),
])  # fmt: skip
def test_a_line_without_its_text_is_named(line, wrong):
    texts_of = _lines.text_reader(SimpleNamespace(field="prompt", input="prompts.jsonl"))
    assert texts_of([Line(b'{"prompt": "a"}')]) == [b"a"]
    with pytest.raises(ValueError, match=re.escape(f"prompts.jsonl:2: {wrong} (--field)") + "$"):
        texts_of([Line(line)])
