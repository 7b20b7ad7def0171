"""Translates lines: exactly as many come out as go in, whatever they hold.

    python -m tools.translate --saved_model=DIR <lines.txt >translations.txt
    python -m tools.translate --logdir=RUN --input=lines.txt --output=translations.txt
    python -m tools.translate --saved_model=DIR            (at a terminal: line by line)

Only a newline ends a line. Blank lines stay blank; bytes that are not UTF-8 are read as unknown
characters; a line that is too long is cut, with a warning. An output file is there whole or not at all; a pipe or a
device is written as lines are done.
"""

import contextlib
import os
import sys
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from lingvo_moe.core.engine.progress import LineProgress
from lingvo_moe.core.files import atomic_file
from lingvo_moe.tasks.mt.line_stream import Counts, translate_stream
from tools import _cli

_SECONDS_BETWEEN_NOTES = 2.0


def main(argv: list[str] | None = None) -> int:
    parser = _cli.Parser(prog="python -m tools.translate", description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--saved_model", metavar="DIR", help="what tools.export wrote")
    model.add_argument("--logdir", metavar="RUN", help="a run, as given to the trainer")
    parser.add_argument(
        "--input", metavar="FILE", help="lines to translate (default: standard input)"
    )
    parser.add_argument("--output", metavar="FILE", help="what to write (default: standard output)")
    parser.add_argument(
        "--language",
        metavar="CODE",
        help="the source language, e.g. de; only models that route by language (docs/moe.md) look at it",
    )
    parser.add_argument(
        "--batch_size", type=int, default=256, help="lines read before any is written (%(default)s)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    _cli.add_search_flags(parser)
    args = parser.parse_args(argv)
    _cli.check_at_least(parser, args, batch_size=1)
    try:
        return _run(args)
    except (ValueError, OSError) as e:
        print(f"translate: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(args: Any) -> int:
    with contextlib.ExitStack() as stack:
        source = sys.stdin.buffer
        if args.input:
            source = stack.enter_context(open(args.input, "rb"))
        if args.output:
            _cli.check_output_file(args.output)
        _cli.load_tensorflow()
        translator, _ = _cli.open_translator(args)
        if not args.input and not args.output and sys.stdin.isatty():
            return _converse(translator, args.language)
        try:
            sink = stack.enter_context(_open_output(args.output))
            show = stack.enter_context(LineProgress(interval=_SECONDS_BETWEEN_NOTES))

            def progress(counts: Counts) -> None:
                # Where translations appear on the same screen, they are progress enough.
                if not args.quiet and not sink.isatty():
                    rate = counts.lines / max(counts.seconds, 1e-9)
                    show(f"translate: {counts.lines} lines, {rate:.0f} a second")

            def warn(message: str) -> None:
                show.Close()  # a warning has a line of its own
                _warn(message)

            counts = translate_stream(
                lambda lines: translator.Translate(lines, args.language),
                source,
                sink,
                args.batch_size,
                warn,
                progress,
            )
        except BrokenPipeError:
            # Whoever read our output has enough. Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    if not args.quiet:
        _warn(f"{counts.lines} lines in {counts.seconds:.1f} s")
    return 0


def _converse(translator: Any, language: str | None) -> int:
    """Translates what is typed until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # gives input() a history and line editing

        del readline
    _warn("one line each; end with Ctrl-D")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        out = translator.Translate([line.encode("utf-8", "surrogateescape")], language)
        print(out.translations[0][0], flush=True)
        if out.truncated[0]:
            _warn("the line is too long: its end is not translated")


def _warn(message: str) -> None:
    print(f"translate: {message}", file=sys.stderr, flush=True)


def _open_output(path: str | None) -> AbstractContextManager[BinaryIO]:
    """Standard output; a file that appears when all went well; what is no file, e.g. a pipe, as it is."""
    if not path:
        return contextlib.nullcontext(sys.stdout.buffer)
    if os.path.exists(path) and not os.path.isfile(path):
        return open(path, "wb")
    return atomic_file(path)


if __name__ == "__main__":
    sys.exit(main())
