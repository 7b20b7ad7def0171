"""The input and output of the commands that answer each line with a line."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from lingvo_moe.core.config import checks
from lingvo_moe.core.console import units
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.console.waiting import LineProgress
from lingvo_moe.core.files.files import atomic_file
from lingvo_moe.tasks.text.decoding.line_stream import Answer, Counts, Line, answer_stream

from . import _cli

_SECONDS_BETWEEN_NOTES = 2.0


def define_flags(flags: Flags, what: str, languages: bool = True) -> None:
    """Defines --language, if there are `languages`, --input, --output, --batch_size and --quiet.

    `what` is its input, for the help: "lines to translate".
    """
    if languages:
        flags.DEFINE_string(
            "language",
            None,
            "the source language, e.g. de, of a model that routes by language (docs/moe.md); SOURCE-TARGET, e.g. "
            "eng_Latn-fra_Latn, of an imported translator (docs/importing.md); others use none",
        )
    flags.DEFINE_path("input", None, f"a file of {what} (default: standard input)")
    flags.DEFINE_path("output", None, "the file to write (default: standard output)")
    flags.DEFINE_integer("batch_size", 256, "lines read before any is written", checks.SIZE)
    _cli.define_quiet_flag(flags)


def define_field_flag(flags: Flags) -> None:
    flags.DEFINE_string(
        "field",
        None,
        "lines are JSON objects with a text in this field (default: text, if --input is *.jsonl; else lines are texts)",
    )


def text_reader(args: Flags) -> Callable[[list[Line]], list[bytes]]:
    """A function from the next lines to their texts. It raises ValueError: one has no such field."""
    from lingvo_moe.tasks.text.data.tsv import text_of  # with NumPy, for which --help need not wait

    field = args.field or ("text" if (args.input or "").endswith(".jsonl") else None)
    numbers = itertools.count(1)

    def text(line: Line) -> bytes:
        number = next(numbers)
        if field is None:
            return line.text
        try:
            return text_of(line.text, field).encode()
        except ValueError as e:
            wrong = str(e).partition(": ")[2]  # without the name of what is counted
            raise ValueError(
                f"{args.input or 'standard input'}:{number}: {wrong} (--field)"
            ) from None

    return lambda lines: [text(line) for line in lines]


@contextlib.contextmanager
def opened(args: Flags) -> Iterator[tuple[BinaryIO, AbstractContextManager[BinaryIO]]]:
    """Yields the input, and the output, which opens when it is entered; checks both before slow work begins."""
    with contextlib.ExitStack() as stack:
        source: Any = sys.stdin.buffer
        if args.input:
            try:
                source = stack.enter_context(open(args.input, "rb"))
            except OSError as e:
                raise ValueError(f"--input={args.input}: cannot be read ({e.strerror})") from None
        if args.output:
            _cli.check_output_file(args.output)
        yield source, _output(args.output)


def answer_all(
    name: str,
    args: Flags,
    answer: Answer,
    source: BinaryIO,
    sink: AbstractContextManager[BinaryIO],
    reused: Callable[[], int] = int,
) -> int:
    """Answers every line of `source` for the command `name`, with progress; returns the exit status.

    `reused` counts the lines so far whose answers were there before.
    """
    total = 0 if args.quiet or not args.input else _count_lines(args.input)
    try:
        with sink as out, LineProgress(interval=_SECONDS_BETWEEN_NOTES) as show:

            def progress(counts: Counts) -> None:
                # Where answers appear on the same screen, they are progress enough.
                if not args.quiet and not out.isatty():
                    show(f"{name}: {_progress(counts, total, reused())}")

            def warn(message: str) -> None:
                show.Close()  # a warning has a line of its own
                say(f"{name}: {message}")

            counts = answer_stream(answer, source, out, args.batch_size, warn, progress)
    except BrokenPipeError:
        # Nobody reads our output any more. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if not args.quiet:
        written = f"; written: {args.output}" if args.output else ""
        say(f"{name}: {_lines(counts)} in {counts.seconds:.1f} s{written}")
    return 0


def _progress(counts: Counts, total: int, reused: int) -> str:
    """'512 of 1,000 lines, 25 a second, 20s left'. `total` is 0 where it is not known."""
    rate = (counts.lines - reused) / max(counts.seconds, 1e-9)
    text = f"{counts.lines:,} of {total:,} lines" if counts.lines < total else _lines(counts)
    text += f", {reused:,} of them from before" if reused else ""
    if not rate:
        return text
    left = (total - counts.lines) / rate
    return f"{text}, {rate:.0f} a second" + (f", {units.clock(left)} left" if left > 0 else "")


def _count_lines(path: str) -> int:
    """The lines of a file; 0 for a pipe or a device, which can be read only once."""
    if not os.path.isfile(path):
        return 0
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while some := file.read(1 << 20):
            count, last = count + some.count(b"\n"), some[-1:]
    return count + (last != b"\n")


def _lines(counts: Counts) -> str:
    return "1 line" if counts.lines == 1 else f"{counts.lines} lines"


def _output(path: str | None) -> AbstractContextManager[BinaryIO]:
    """Standard output; a file that appears when all went well; or, as it is, a pipe or a device."""
    if not path:
        return contextlib.nullcontext(sys.stdout.buffer)
    return atomic_file(path) if is_file(path) else open(path, "wb")


def is_file(path: str | None) -> bool:
    """Whether an output is a file, or becomes one, and no pipe or device."""
    return path is not None and (not os.path.exists(path) or os.path.isfile(path))
