"""What the tools that answer lines with lines have in common: where lines come from and go to."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from lingvo_moe.core.engine.progress import LineProgress
from lingvo_moe.core.files import atomic_file
from lingvo_moe.tasks.mt.decoding.line_stream import Answer, Counts, answer_stream
from tools import _cli

_SECONDS_BETWEEN_NOTES = 2.0


def add_flags(parser: argparse.ArgumentParser, what: str) -> None:
    """--language, --input, --output, --batch_size and --quiet."""
    parser.add_argument(
        "--language",
        metavar="CODE",
        help="the source language, e.g. de; only models that route by language (docs/moe.md) look at it",
    )
    parser.add_argument(
        "--input", type=_cli.local_path, metavar="FILE", help=f"{what} (default: standard input)"
    )
    parser.add_argument(
        "--output",
        type=_cli.local_path,
        metavar="FILE",
        help="what to write (default: standard output)",
    )
    parser.add_argument(
        "--batch_size", type=int, default=256, help="lines read before any is written (%(default)s)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


@contextlib.contextmanager
def opened(args: argparse.Namespace) -> Iterator[tuple[BinaryIO, AbstractContextManager[BinaryIO]]]:
    """What to read, and what to write once it is entered; complains of either before anything slow is done."""
    with contextlib.ExitStack() as stack:
        source: Any = sys.stdin.buffer
        if args.input:
            source = stack.enter_context(open(args.input, "rb"))
        if args.output:
            _cli.check_output_file(args.output)
        yield source, _output(args.output)


def answer_all(
    name: str,
    args: argparse.Namespace,
    answer: Answer,
    source: BinaryIO,
    sink: AbstractContextManager[BinaryIO],
) -> int:
    """The status of a tool by this name that answers every line of `source`; tells how far it is."""

    def say(message: str) -> None:
        print(f"{name}: {message}", file=sys.stderr, flush=True)

    try:
        with sink as out, LineProgress(interval=_SECONDS_BETWEEN_NOTES) as show:

            def progress(counts: Counts) -> None:
                # Where answers appear on the same screen, they are progress enough.
                if not args.quiet and not out.isatty():
                    rate = counts.lines / max(counts.seconds, 1e-9)
                    show(f"{name}: {counts.lines} lines, {rate:.0f} a second")

            def warn(message: str) -> None:
                show.Close()  # a warning has a line of its own
                say(message)

            counts = answer_stream(answer, source, out, args.batch_size, warn, progress)
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if not args.quiet:
        say(f"{counts.lines} lines in {counts.seconds:.1f} s")
    return 0


def _output(path: str | None) -> AbstractContextManager[BinaryIO]:
    """Standard output; a file that appears when all went well; what is no file, e.g. a pipe, as it is."""
    if not path:
        return contextlib.nullcontext(sys.stdout.buffer)
    if os.path.exists(path) and not os.path.isfile(path):
        return _in_place(path)
    return atomic_file(path)


@contextlib.contextmanager
def _in_place(path: str) -> Iterator[BinaryIO]:
    with open(path, "wb") as file:
        yield file
