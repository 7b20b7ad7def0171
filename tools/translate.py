"""Translates lines: each input line gives exactly one output line.

    python -m tools.translate --saved_model=DIR <lines.txt >translations.txt
    python -m tools.translate --logdir=RUN --input=lines.txt --output=translations.txt
    python -m tools.translate --saved_model=DIR            (at a terminal: line by line)
    python -m tools.translate --logdir=RUN --nbest=4 <lines.txt   (NUMBER<TAB>SCORE<TAB>TRANSLATION)
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

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.decode.ranges import BEAM_SIZE, Sampling
from lingvo_moe.core.files.store import is_address
from lingvo_moe.tasks.text.decoding.line_stream import Answer, Line, translation_of
from lingvo_moe.tasks.text.decoding.noise import Noise, read_noise

from . import _cli, _lines, _mesh, _models

if TYPE_CHECKING:
    from lingvo_moe.core.nested_map import NestedMap
    from lingvo_moe.tasks.text.preparing.beam import BeamRunner

_BATCHES = 64  # that a job of a runner translates


def define_flags() -> Flags:
    flags = Flags("python -m tools.translate", __doc__)
    _cli.define_model_flags(flags)
    _lines.define_flags(flags, "lines to translate")
    flags.DEFINE_integer(
        "nbest",
        None,
        "translations of a line, each in a line NUMBER<TAB>SCORE<TAB>TRANSLATION (default: the best, alone)",
        BEAM_SIZE,
    )
    _cli.define_search_flags(flags)
    _mesh.define_flags(flags)
    _define_drawing_flags(flags)
    _cli.define_runner_flags(flags)
    because = "workers read exported models and files"
    flags.OnlyWith("runner", because, saved_model=True, input=True, output=True)
    flags.OnlyWith("nbest noise", "workers write translations as they are", runner=False)
    return flags


def _define_drawing_flags(flags: Flags) -> None:
    with flags.Section("for back-translation (docs/back_translation.md)"):
        ranges = Sampling.RANGES
        help = "draw translations, by logits divided by this (default: search for the best)"
        flags.DEFINE_float("temperature", None, help, checks.POSITIVE)
        help = "draw one of this many most likely tokens; 0: of all"
        flags.DEFINE_integer("top_k", 0, help, ranges["top_k"])
        flags.DEFINE_integer("seed", 0, "of what is drawn, beside the line", ranges["seed"])
        help = "shares of words of a translation to leave out and to replace by <blank>, and how far others move"
        flags.DEFINE_parsed("noise", None, help, read_noise, "DROP,BLANK,SHUFFLE")
    flags.OnlyWith("temperature", "an exported model searches", logdir=True)
    flags.OnlyWith("top_k", "nothing is drawn", temperature=True)
    flags.OnlyWith("beam_size", "each translation is drawn by itself", temperature=False)


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if args.runner and is_address(args.saved_model):
        why = "workers read models from a disk that all of them see"
        args.Fail(f"--saved_model={args.saved_model} goes without --runner: {why}")
    stopped = "stopped; the same command resumes from there" if _lines.is_file(args.output) else ""
    if args.seed and not (args.temperature or args.noise):
        args.Fail(f"--seed={args.seed} goes with --temperature or --noise: nothing is drawn")
    beam_size = args.beam_size or 4
    if args.logdir and not args.temperature and (args.nbest or 1) > beam_size:
        args.Fail(f"--nbest={args.nbest} goes with a --beam_size of as many, not of {beam_size}")
    return _mesh.attempt("translate", lambda: _run(args), stopped)


def _run(args: Flags) -> int:
    with _lines.opened(args) as (source, sink):
        runner = _cli.beam_runner(args)
        _mesh.load_tensorflow(args)
        translator, about = _models.open_translator(args)
        if args.language and not translator.languages:
            raise ValueError(
                f"--language={args.language} has no effect: this model does not route by language; leave it out"
            )
        if args.saved_model and args.nbest and args.nbest > (most := translator.options.top_k):
            raise ValueError(
                f"--nbest={args.nbest}: {args.saved_model} gives {most} of a line: tools.export --top_k={args.nbest}"
            )
        if runner:
            return _with_beam(args, runner, source, sink)

        def translate(lines: list[bytes]) -> "NestedMap":
            out = translator.Translate(lines, args.language)
            if args.nbest:  # of an exported model there may be more
                out.translations = [row[: args.nbest] for row in out.translations]
            return out

        drop, blank, shuffle = args.noise or (0.0, 0.0, 0)
        noise = Noise(drop, blank, shuffle, args.seed) if args.noise else str
        answer = translation_of(translate, bool(args.nbest), noise)
        if not args.input and not args.output and sys.stdin.isatty():
            return _converse(answer)
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
        keeper = KeptTranslations(lambda lines, _: answer(lines), work, identity)
        return _lines.answer_all(
            "translate", args, lambda lines: keeper(lines, []), source, sink, lambda: keeper.reused
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


def _converse(answer: Answer) -> int:
    """Answers typed lines until the end of input."""
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
        ((text, warning),) = answer([Line(line.encode("utf-8", "surrogateescape"))])
        print(*([text] if isinstance(text, str) else text), sep="\n", flush=True)
        if warning:
            _warn(f"the line {warning}")


def _warn(message: str) -> None:
    say(f"translate: {message}")


if __name__ == "__main__":
    _cli.run(main)
