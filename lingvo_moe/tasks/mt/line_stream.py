"""A stream of lines through a translator: one line out for each line in, in bounded memory. Free of TensorFlow."""

import codecs
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

# Far more than any model translates; of longer lines only the start is kept.
MAX_LINE_BYTES = 1 << 20
WARNINGS = 10


@dataclass(frozen=True)
class Line:
    """What a stream has up to a newline.

    Attributes:
        text: without the newline, and a carriage return before it.
        has_newline: False only for what follows the last newline.
        is_cut: whether it was longer than MAX_LINE_BYTES and its end was left out.
    """

    text: bytes
    has_newline: bool = True
    is_cut: bool = False


@dataclass
class Counts:
    """What went through."""

    lines: int = 0
    truncated: int = 0
    seconds: float = 0.0


def read_lines(source: BinaryIO) -> Iterator[Line]:
    """The lines of a stream. Only b'\\n' ends one; a byte order mark at the very start is left out."""
    is_first = True
    while text := source.readline(MAX_LINE_BYTES):
        is_cut = False
        rest = text
        while not rest.endswith(b"\n"):
            rest = source.readline(MAX_LINE_BYTES)
            if not rest:
                break
            is_cut |= rest not in (b"\n", b"\r\n")
        if is_first:
            text = text.removeprefix(codecs.BOM_UTF8)
            is_first = False
        has_newline = rest.endswith(b"\n")
        yield Line(text.removesuffix(b"\n").removesuffix(b"\r"), has_newline, is_cut)


def translate_stream(
    translate: Callable[[list[bytes]], Any],
    source: BinaryIO,
    sink: BinaryIO,
    batch_lines: int,
    warn: Callable[[str], None],
    progress: Callable[[Counts], None],
) -> Counts:
    """Translates `source` line by line to `sink`; a last line without newline stays without one.

    Args:
        translate: lines -> NestedMap(translations, scores, truncated), as a Translator's.
        source: to read.
        sink: to write; flushed after each batch.
        batch_lines: lines in memory and in the translator's hands at once.
        warn: told of the first lines that were cut, and at the end of how many there were.
        progress: called after each batch.
    """
    counts = Counts()
    start = time.monotonic()
    lines = read_lines(source)
    while batch := list(itertools.islice(lines, batch_lines)):
        out = translate([line.text for line in batch])
        texts = [one_line(row[0]).encode("utf-8", "replace") for row in out.translations]
        if len(texts) != len(batch):
            raise RuntimeError(f"{len(texts)} translations of {len(batch)} lines")
        for number, (line, cut) in enumerate(zip(batch, out.truncated), counts.lines + 1):
            if line.is_cut or cut:
                counts.truncated += 1
                if counts.truncated <= WARNINGS:
                    warn(f"line {number} is too long: its end is not translated")
        sink.write(b"".join(t + b"\n" * line.has_newline for t, line in zip(texts, batch)))
        sink.flush()
        counts.lines += len(batch)
        counts.seconds = time.monotonic() - start
        progress(counts)
    if counts.truncated > WARNINGS:
        warn(f"{counts.truncated} lines in all were too long")
    return counts


def one_line(text: str) -> str:
    """The text with whatever ends a line, to whichever reader, turned into a space."""
    return " ".join(text.splitlines())
