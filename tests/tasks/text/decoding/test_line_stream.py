"""Lines in, lines out."""

import io
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.decoding import line_stream
from lingvo_moe.tasks.text.decoding.line_stream import answer_stream, read_lines, translation_of


class Echo:
    """Marks each line; lines with 'long' count as truncated."""

    def __init__(self):
        self.batches = []

    def Translate(self, lines):
        self.batches.append(len(lines))
        return NestedMap(
            translations=[["<" + line.decode("utf-8", "replace") + ">"] for line in lines],
            scores=np.zeros([len(lines), 1]),
            truncated=np.array([b"long" in line for line in lines], bool),
        )


def stream(data: bytes, batch_lines: int = 3):
    echo, out, warnings, notes = Echo(), io.BytesIO(), [], []
    counts = answer_stream(
        translation_of(echo.Translate),
        io.BytesIO(data),
        out,
        batch_lines,
        warnings.append,
        lambda c: notes.append(c.lines),
    )
    return out.getvalue(), counts, warnings, notes, echo


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *map(str.encode, ("a", "\n", "\r", "\0", "\u2028", "\ufeff", "\x0b", "\x85", " ")),
                b"\xff",
            ]
        )
    ),
    st.integers(1, 4),
)
def test_as_many_lines_out_as_in(parts, batch_lines):
    data = b"".join(parts)
    out, counts, *_ = stream(data, batch_lines)
    assert out.count(b"\n") == data.count(b"\n")
    assert out.endswith(b"\n") == data.endswith(b"\n")
    ends = data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    assert counts.lines == ends
    assert len(out.decode().splitlines()) == ends  # also for readers that know more line ends


@pytest.mark.parametrize("data, want", [
    (b"", []),
    (b"a", [b"a"]),
    (b"a\n\nb\r\n", [b"a", b"", b"b"]),
    (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [b"a", b"\xef\xbb\xbfb"]),
    (b"\n\n", [b"", b""]),
])  # fmt: skip
def test_read_lines(data, want):
    assert [line.text for line in read_lines(io.BytesIO(data))] == want


def test_memory_is_bounded_on_a_line_without_end(monkeypatch):
    monkeypatch.setattr(line_stream, "MAX_LINE_BYTES", 8)
    data = b"0123456789" * 5 + b"\nb\n" + b"01234567\n" + b"0123456\r\n" + b"x" * 20
    lines = list(read_lines(io.BytesIO(data)))
    texts = [line.text for line in lines]
    assert texts == [b"01234567", b"b", b"01234567", b"0123456", b"xxxxxxxx"]
    assert [line.is_cut for line in lines] == [True, False, False, False, True]
    out, counts, warnings, *_ = stream(data)
    assert out.count(b"\n") == 4
    assert counts.warned == 2
    assert warnings[0].startswith("line 1 is too long")


def test_of_a_line_without_end_only_the_start_is_in_memory(monkeypatch):
    monkeypatch.setattr(line_stream, "MAX_LINE_BYTES", 2**16)
    parts = iter([b"x" * 2**16] * 500)
    source = SimpleNamespace(readline=lambda most: next(parts, b""))
    tracemalloc.start()
    (line,) = read_lines(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert line.is_cut and line.text == b"x" * 2**16 and peak < 4 * 2**16


def test_batches_progress_and_warnings():
    _, counts, warnings, notes, echo = stream(b"long\n" * 25 + b"a\n", batch_lines=10)
    assert echo.batches == [10, 10, 6]
    assert notes == [10, 20, 26]
    assert counts.warned == 25
    assert len(warnings) == line_stream.WARNINGS + 1
    assert "25 lines" in warnings[-1]


def test_a_translator_that_loses_lines_is_found_out():
    class Loses(Echo):
        def Translate(self, lines):
            return super().Translate(lines[1:])

    source = io.BytesIO(b"x\ny\n")
    with pytest.raises(RuntimeError, match="1 translations of 2 lines"):
        answer_stream(
            translation_of(Loses().Translate), source, io.BytesIO(), 5, print, lambda _: None
        )


def test_several_translations_of_a_line_have_its_number_and_scores():
    class Two:
        def Translate(self, lines):
            scores = [[-0.5, -1e9] if line == b"one" else [0.0, 0.0] for line in lines]
            scores = np.array([s if line else [0.0, 0.0] for s, line in zip(scores, lines)])
            texts = [[line.decode().upper(), "second"] if line else ["", ""] for line in lines]
            return NestedMap(translations=texts, scores=scores, truncated=[False] * len(lines))

    sink = io.BytesIO()
    answer = translation_of(
        Two().Translate, scores=True, change=lambda text: text.replace("T", "t")
    )
    answer_stream(answer, io.BytesIO(b"two\n\none"), sink, 2, print, lambda _: None)
    assert sink.getvalue() == (b"1\t0.0000\ttWO\n1\t0.0000\tsecond\n2\t0.0000\t\n3\t-0.5000\tONE")
