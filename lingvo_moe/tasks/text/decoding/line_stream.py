"""A stream of lines through a model: one line out for each line in, in bounded memory. Free of TensorFlow."""

import codecs
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from lingvo_moe.tasks.text.data.encodings import check_start

# Far more than any model translates. Of a longer line only the start is kept.
MAX_LINE_BYTES = 1 << 20
WARNINGS = 10
_LEAST = -1e8  # the score of what is no translation is lower


@dataclass(frozen=True)
class Line:
    """A line of a stream."""

    text: bytes  # its bytes, without the newline and a carriage return before it
    has_newline: bool = True  # False only for a last line without a newline
    is_cut: bool = False  # whether it was longer than MAX_LINE_BYTES, so that its end was left out


@dataclass
class Counts:
    """The lines answered so far, those with a warning, and the seconds since the start."""

    lines: int = 0
    warned: int = 0
    seconds: float = 0.0


def read_lines(source: BinaryIO) -> Iterator[Line]:
    """Yields the lines of a stream. Only b'\\n' ends a line; a byte order mark at the very start is left out.

    Raises DataError: it is UTF-16 or UTF-32.
    """
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
            check_start("the input", text)
            text = text.removeprefix(codecs.BOM_UTF8)
            is_first = False
        has_newline = rest.endswith(b"\n")
        yield Line(text.removesuffix(b"\n").removesuffix(b"\r"), has_newline, is_cut)


# From lines to (answer, warning for the user) of each; '' is no warning. Of a list of answers, each gets a line, which
# begins with the number of the line that is answered, from 1, and a tab.
Answer = Callable[[list[Line]], Sequence[tuple[str | list[str], str]]]


def answer_stream(
    answer: Answer,
    source: BinaryIO,
    sink: BinaryIO,
    batch_lines: int,
    warn: Callable[[str], None],
    progress: Callable[[Counts], None],
) -> Counts:
    """Writes the answer to each line of `source` as a line of `sink`; a last line without newline stays without one.

    Args:
        answer: returns (text, warning) for each of a batch of lines.
        sink: the stream to write; flushed after each batch.
        batch_lines: lines of a batch; no more are in memory.
        warn: called with the first WARNINGS warnings and, if there are more, at the end with their number.

    Raises:
        RuntimeError: `answer` returned another number of answers than lines.
    """
    counts = Counts()
    start = time.monotonic()
    lines = read_lines(source)
    while batch := list(itertools.islice(lines, batch_lines)):
        answers = answer(batch)
        if len(answers) != len(batch):
            raise RuntimeError(f"{len(answers)} answers to {len(batch)} lines")
        for number, (_, warning) in enumerate(answers, counts.lines + 1):
            if warning:
                counts.warned += 1
                if counts.warned <= WARNINGS:
                    warn(f"line {number} {warning}")
        texts = [
            _written(text, number).encode("utf-8", "replace")
            for number, (text, _) in enumerate(answers, counts.lines + 1)
        ]
        sink.write(b"".join(t + b"\n" * line.has_newline for t, line in zip(texts, batch)))
        sink.flush()
        counts.lines += len(batch)
        counts.seconds = time.monotonic() - start
        progress(counts)
    if counts.warned > WARNINGS:
        warn(f"{counts.warned} lines in all had such a warning")
    return counts


def _written(text: str | list[str], number: int) -> str:
    if isinstance(text, str):
        return one_line(text)
    return "\n".join(f"{number}\t{one_line(one)}" for one in text)


def translation_of(
    translate: Callable[[list[bytes]], Any],
    scores: bool = False,
    change: Callable[[str], str] = str,
) -> Answer:
    """Makes the `Answer` of a translator for `answer_stream`: the best translation of each line.

    The warning of a line says that its end is not translated, if the line was longer than MAX_LINE_BYTES or than the
    model's limit.

    Args:
        translate: lines -> NestedMap(translations, scores, truncated), as a Translator's `Translate`.
        scores: whether to give all translations, each after its score and a tab.
        change: what becomes of a translation.

    Returns:
        A function that raises RuntimeError if `translate` returns another number of translations than lines.
    """

    def answer(lines: list[Line]) -> list[tuple[str, str]]:
        out = translate([line.text for line in lines])
        if len(out.translations) != len(lines):
            raise RuntimeError(f"{len(out.translations)} translations of {len(lines)} lines")
        warning = "is too long: its end is not translated"
        texts: list[Any] = [change(row[0]) for row in out.translations]
        if scores:
            texts = [
                # There may be fewer than asked for; of a blank line, with score 0, there is one.
                [
                    f"{s:.4f}\t{change(t)}"
                    for i, (t, s) in enumerate(pairs)
                    if not i or (s > _LEAST and (s or t))
                ]
                for pairs in map(zip, out.translations, out.scores.tolist())
            ]
        return [
            (text, warning if line.is_cut or cut else "")
            for line, text, cut in zip(lines, texts, out.truncated)
        ]

    return answer


def utf8_of(text: str) -> bytes:
    """Encodes a line as UTF-8, for every caller of a translator.

    Half of a surrogate pair, which Python and JSON can spell and UTF-8 cannot, becomes U+FFFD. A translator replaces
    bytes that are not UTF-8 by U+FFFD too.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def one_line(text: str) -> str:
    """The lines of a text, as str.splitlines has them, with spaces between them."""
    return " ".join(text.splitlines())
