"""Unusual lines: N lines in, N lines out, and the same text by every way.

The ways: Python, the SavedModel alone, tools.translate from a file and a pipe, tools.serve, tools.score and
tools.evaluate.
"""

import base64
import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tensorflow as tf
import toy_translation as toy
from local_server import Running, running

from lingvo_moe.tasks.mt.decoding.line_stream import MAX_LINE_BYTES, answer_stream, translation_of
from lingvo_moe.tasks.mt.decoding.translator import Translator
from lingvo_moe.tasks.mt.quality.forced_decoding import ScoreOptions, Scorer
from lingvo_moe.tasks.mt.serving.limits import Limits
from lingvo_moe.tasks.mt.serving.saved_translator import SavedTranslator
from tools import evaluate, score, translate

_ROOT = Path(__file__).resolve().parents[2]
_LONG = b"red " * 1_000_000
_MATRIX = {
    "nothing": b"",
    "empty": b"\n\n",
    "blank": b"   \n\t\nred\n",
    "no newline at the end": b"red\ngreen",
    "BOM": b"\xef\xbb\xbfred\ngreen\n",
    "BOM and no more": b"\xef\xbb\xbf",
    "NUL": b"\0\nred\0green\n",
    "not UTF-8": b"\xff\xfe\nred \xc3\n\xed\xa0\x80\n",
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
    """For readers that know newlines only, and for those that know every line end."""
    data, out = _MATRIX[name], model.Text(name)
    assert out.count(b"\n") == data.count(b"\n")
    bom_alone = name == "BOM and no more"  # a line without text and without newline is no line
    assert len(out.decode().splitlines()) == _count(data) - bom_alone
    assert bool(out.strip()) == bool(re.search(b"red|\xff", data))


# --- the same text everywhere


@pytest.mark.parametrize("name", _MATRIX)
def test_in_python_in_other_batches(name, model):
    assert in_python(model.translator, _MATRIX[name], 7) == model.Text(name)


@pytest.mark.parametrize("name", _MATRIX)
def test_the_saved_model_alone(name, model):
    """By its signature, all lines at once. A reader of lines would remove a BOM, and CR before a newline."""
    data = _MATRIX[name].removeprefix(b"\xef\xbb\xbf")
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    translate_ = model.opened._loaded.signatures["predict"]
    out = translate_(text=tf.constant(lines))["translations"].numpy()
    assert b"\n".join(out[:, 0]) == model.Text(name)


@pytest.mark.parametrize(
    "spelled", [b"red \xff green", "red \ud800 green"], ids=["a byte", "half a pair"]
)
def test_what_is_no_text_is_one_unknown_character(spelled, model, server):
    """An invalid byte and half of a surrogate pair become U+FFFD, also for the tokenizer's normalization."""
    (want,) = model.translator.Translate(["red \ufffd green"]).translations[0]
    assert want != model.translator.Translate(["red ? green"]).translations[0][0]
    for translator in (model.translator, model.opened):
        assert translator.Translate([spelled]).translations == [[want]]
    if isinstance(spelled, bytes):
        instance: object = {"b64": base64.b64encode(spelled).decode()}
    else:
        instance = spelled
        assert server.Translate(spelled) == [want]
    reply = server.Ask("POST", "/v1/models/translator:predict", {"instances": [instance]})
    assert reply.content["predictions"][0]["translations"] == [want]


@pytest.fixture
def tool(monkeypatch, model, tmp_path, capfd) -> Callable[..., tuple[bytes, str]]:
    """Runs tools.translate in this process, with a loaded model."""
    monkeypatch.setattr(translate._cli, "open_translator", lambda args: (model.opened, {}))

    def run(data: bytes, *flags: str, by_file: bool = False) -> tuple[bytes, str]:
        if by_file:
            (tmp_path / "in.txt").write_bytes(data)
            flags += (f"--input={tmp_path}/in.txt",)
        else:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        out = tmp_path / "out.txt"
        assert (
            translate.main([f"--saved_model={model.saved_model}", f"--output={out}", *flags]) == 0
        )
        return out.read_bytes(), capfd.readouterr().err

    return run


@pytest.mark.parametrize("batch_lines, by_file", [(1, False), (256, True)])
@pytest.mark.parametrize("name", _MATRIX)
def test_tools_translate(name, batch_lines, by_file, model, tool):
    data = _MATRIX[name]
    out, err = tool(data, f"--batch_size={batch_lines}", by_file=by_file)
    assert out == model.Text(name)
    assert f"translate: {_count(data)} lines in" in err
    assert ("line 1 is too long: its end is not translated" in err) == (name == "long")


def test_blank_stays_blank_and_text_does_not(model, tool):
    out, _ = tool(b"\n  \nred house\n\xef\xbb\xbf\n")
    want = model.translator.Translate(["red house"]).translations[0][0]
    assert want
    assert out.decode().split("\n") == ["", "", want, "", ""]


def test_a_real_process_in_a_pipe(model):
    """The command with the complete matrix: text on stdout, all else on stderr."""
    names = ["BOM", *(n for n in _MATRIX if "BOM" not in n and n != "no newline at the end")]
    names.append("no newline at the end")
    done = subprocess.run(
        [sys.executable, "-m", "tools.translate", f"--saved_model={model.saved_model}"],
        input=b"".join(_MATRIX[name] for name in names),
        capture_output=True,
        cwd=_ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"".join(model.Text(name) for name in names)
    notes = done.stderr.decode().splitlines()
    assert [note for note in notes if "is too long" in note], notes
    assert all(re.match(r"translate: (line )?\d+ ", note) for note in notes), notes


@pytest.fixture(scope="module")
def server(model) -> Iterator[Running]:
    with running(model.opened, _WIDE, max_batch_lines=256) as it:
        yield it


@pytest.mark.parametrize("name", _MATRIX)
def test_tools_serve(name, model, server):
    """As one text; as lines, which are bytes; by the dozen, and alone."""
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


def test_tools_evaluate(model, monkeypatch, tmp_path, capfd):
    """Held-out pairs with such sources: four files stay in step, whichever line ends a reader knows."""
    sources = [line for data in _MATRIX.values() for line in data.split(b"\n") if b"\0" not in line]
    pairs = [(s.decode().strip(), "green\u2028tree\x0b") for s in sources if _is_pair(s)]
    assert len(pairs) > 10
    (tmp_path / "data/dev").mkdir(parents=True)
    text = "".join(f"{source}\t{target} {i}\n" for i, (source, target) in enumerate(pairs))
    (tmp_path / "data/dev/xx.tsv").write_bytes(text.encode())
    monkeypatch.setattr(evaluate._cli, "open_translator", lambda args: (model.opened, {}))
    flags = [f"--data_dir={tmp_path}/data", f"--output={tmp_path}/out", "--quiet"]
    assert evaluate.main([f"--saved_model={model.saved_model}", *flags]) == 0
    texts = {}
    for suffix in ("src", "ref", "hyp"):
        file = tmp_path / f"out/texts/xx.{suffix}"
        texts[suffix] = file.read_bytes().decode().split("\n")[:-1]
        assert len(texts[suffix]) == len(pairs) == len(file.read_text().splitlines())
    assert [ref.split()[-1] for ref in texts["ref"]] == [str(i) for i in range(len(pairs))]
    hypotheses = [row[0] for row in model.translator.Translate([s for s, _ in pairs]).translations]
    assert texts["hyp"] == hypotheses
    assert evaluate.main([f"--saved_model={model.saved_model}", *flags, "--rescore"]) == 0


def _is_pair(source: bytes) -> bool:
    with contextlib.suppress(UnicodeDecodeError):
        return 0 < len(source) < 10_000 and bool(source.decode().strip())
    return False


# --- memory


def _peak_mb(do: Callable[[], object]) -> float:
    """The increase of this process's peak memory while a function ran, in MB."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far

    def kb(field: str) -> int:
        return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    before = kb("VmRSS")
    do()
    return (kb("VmHWM") - before) / 1024


class _Endless(io.RawIOBase):
    """A stream of so many bytes without a newline, generated on reading."""

    def __init__(self, parts: int):
        self._parts = itertools.repeat(_LONG, parts)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self._rest = self._rest or next(self._parts, b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_memory_is_bounded(model, tool, monkeypatch):
    """Lines of a million tokens and of sixteen times as many; at most a megabyte of either is kept."""
    tool(b"red " * 5 + b"\n")

    def run(parts: int) -> None:
        source = io.TextIOWrapper(io.BufferedReader(_Endless(parts)))
        monkeypatch.setattr(sys, "stdin", source)
        out = io.BytesIO()
        answer = translation_of(model.opened.Translate)
        warnings: list[str] = []
        counts = answer_stream(answer, source.buffer, out, 32, warnings.append, lambda _: None)
        assert (counts.lines, counts.warned) == (1, 1), warnings
        assert out.getvalue() == model.Text("long").split(b"\n")[0]

    run(1)
    assert len(_LONG) > 3 * MAX_LINE_BYTES
    peaks = [_peak_mb(lambda parts=parts: run(parts)) for parts in (1, 16)]
    assert max(peaks) < 24, peaks
    assert _peak_mb(lambda: model.translator.Translate([_LONG])) < 64
