"""Translates lines: exactly as many come out as go in, whatever they hold.

    python -m tools.translate --saved_model=DIR <lines.txt >translations.txt
    python -m tools.translate --logdir=RUN --input=lines.txt --output=translations.txt
    python -m tools.translate --saved_model=DIR            (at a terminal: line by line)

Only a newline ends a line. Blank lines stay blank; bytes that are not UTF-8 are read as unknown
characters; a line that is too long is truncated, with a warning. An output file is written atomically; a pipe or a
device is written line by line.
"""

import contextlib
import io
import sys
from typing import Any

from lingvo_moe.tasks.mt.decoding.line_stream import translation_of
from tools import _cli, _lines


def main(argv: list[str] | None = None) -> int:
    parser = _cli.Parser(prog="python -m tools.translate", description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--saved_model", type=_cli.portable_path, metavar="DIR", help="what tools.export wrote"
    )
    model.add_argument(
        "--logdir", type=_cli.portable_path, metavar="RUN", help="a run, as given to the trainer"
    )
    _lines.add_flags(parser, "lines to translate")
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
    with _lines.opened(args) as (source, sink):
        _cli.load_tensorflow()
        translator, _ = _cli.open_translator(args)
        if not args.input and not args.output and sys.stdin.isatty():
            return _converse(translator, args.language)
        answer = translation_of(lambda lines: translator.Translate(lines, args.language))
        return _lines.answer_all("translate", args, answer, source, sink)


def _converse(translator: Any, language: str | None) -> int:
    """Translates what is typed until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # gives input() a history and line editing

        del readline
    assert isinstance(sys.stdin, io.TextIOWrapper)
    sys.stdin.reconfigure(errors="surrogateescape")  # what is pasted need not be UTF-8
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


if __name__ == "__main__":
    _cli.run(main)
