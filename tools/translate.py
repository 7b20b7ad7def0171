"""Translates lines: each input line gives exactly one output line.

    python -m tools.translate --saved_model=DIR <lines.txt >translations.txt
    python -m tools.translate --logdir=RUN --input=lines.txt --output=translations.txt
    python -m tools.translate --saved_model=DIR            (at a terminal: line by line)
    python -m tools.translate --saved_model=DIR --input=lines.txt --output=translations.txt --runner=FlinkRunner

Only a newline ends a line. Blank lines stay blank; bytes that are not UTF-8 are read as unknown
characters; a line that is too long is truncated, with a warning. An output file appears when it is complete; a pipe or
a device is written line by line. After Ctrl-C or another interruption, the same command with --output resumes.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files.store import is_address
from lingvo_moe.tasks.text.decoding.line_stream import Answer, translation_of

from . import _cli, _lines

if TYPE_CHECKING:  # they import TensorFlow
    from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
    from lingvo_moe.tasks.mt.decoding.translator import Translator
    from lingvo_moe.tasks.text.preparing.beam import BeamRunner

_BATCHES = 64  # that a job of a runner translates


def define_flags() -> Flags:
    flags = Flags("python -m tools.translate", __doc__)
    _cli.define_model_flags(flags)
    _lines.define_flags(flags, "lines to translate")
    _cli.define_search_flags(flags)
    _cli.define_runner_flags(flags)
    because = "workers read exported models and files"
    flags.OnlyWith("runner", because, saved_model=True, input=True, output=True)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if args.runner and is_address(args.saved_model):
        why = "workers read models from a disk that all of them see"
        args.Fail(f"--saved_model={args.saved_model} goes without --runner: {why}")
    kept = "stopped; the same command resumes from there" if _lines.is_file(args.output) else ""
    return _cli.attempt("translate", lambda: _run(args), kept)


def _run(args: Flags) -> int:
    with _lines.opened(args) as (source, sink):
        runner = _cli.beam_runner(args)
        _cli.load_tensorflow()
        translator, about = _cli.open_translator(args)
        if args.language and not translator.languages:
            raise ValueError(
                f"--language={args.language} has no effect: this model does not route by language; leave it out"
            )
        if runner:
            return _with_beam(args, runner, source, sink)
        if not args.input and not args.output and sys.stdin.isatty():
            return _converse(translator, args.language)
        answer = translation_of(lambda lines: translator.Translate(lines, args.language))
        if _lines.is_file(args.output):
            return _keeping(args, about, answer, source, sink)
        return _lines.answer_all("translate", args, answer, source, sink)


def _keeping(
    args: Flags,
    about: dict[str, Any],
    answer: Answer,
    source: BinaryIO,
    sink: AbstractContextManager[BinaryIO],
) -> int:
    """Keeps what is done beside the output until that is complete, so that the same command resumes."""
    from lingvo_moe.tasks.mt.quality.kept_translations import KeptTranslations, identity_of
    from lingvo_moe.tasks.text.data.made_once import work_directory

    with work_directory(Path(args.output).absolute(), "translating") as work:
        identity = identity_of(args.Values(), about)
        kept = KeptTranslations(lambda lines, _: answer(lines), work, identity)
        return _lines.answer_all(
            "translate", args, lambda lines: kept(lines, []), source, sink, lambda: kept.reused
        )


def _with_beam(
    args: Flags, runner: "BeamRunner", source: BinaryIO, sink: AbstractContextManager[BinaryIO]
) -> int:
    """Has workers translate blocks of the input, then writes all as a translator of this process would."""
    from lingvo_moe.tasks.mt.decoding import blocks
    from lingvo_moe.tasks.text.data.made_once import clear_others, settings_key, work_directory
    from lingvo_moe.tasks.text.decoding.saved_functions import MANIFEST

    inputs, model, output = (Path(p).resolve() for p in (args.input, args.saved_model, args.output))
    of_input, of_model = inputs.stat(), (model / MANIFEST).read_text()
    changes = (str(inputs), of_input.st_size, of_input.st_mtime_ns)
    key = settings_key([changes, of_model, args.batch_size, _BATCHES, args.language])
    with work_directory(output, "translating") as work:
        clear_others(work, key)
        jobs = [
            blocks.BlockJob(
                str(inputs),
                *at,
                args.batch_size,
                str(model),
                args.language,
                str(work / key / f"{i:06d}"),
            )
            for i, at in enumerate(blocks.blocks_of(inputs, _BATCHES * args.batch_size))
        ]
        made = runner.Run(blocks.answer_block, jobs)
        return _lines.answer_all("translate", args, blocks.answers_in(made), source, sink)


def _converse(translator: "Translator | SavedTranslator", language: str | None) -> int:
    """Translates typed lines until the end of input."""
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
    say(f"translate: {message}")


if __name__ == "__main__":
    _cli.run(main)
