"""Trains the source and target vocabularies of a corpus; writes `source.model` and `target.model`, with their SHA-256.

    python -m tools.train_vocab --data_dir=corpus --output=vocab --source_size=32000 --target_size=16000

A run uses them with `--model_params_override='input.vocab_dir=vocab'`; otherwise it trains its own.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.tasks.text.data.file_list import write_listed
from lingvo_moe.tasks.text.data.scan import scan
from lingvo_moe.tasks.text.vocabulary.vocab_cache import (
    MIN_SENTENCES,
    VocabOptions,
    cached_vocabularies,
)
from lingvo_moe.tasks.text.vocabulary.vocabulary import MIN_SIZE, check_symbols

from . import _cli


def define_flags() -> Flags:
    flags = Flags("python -m tools.train_vocab", __doc__)
    flags.DEFINE_path("data_dir", None, "directory of <lang>.tsv.gz", required=True)
    flags.DEFINE_path("output", None, "directory for the two models", required=True)
    flags.DEFINE_list("languages", (), "e.g. de,sw (default: all)")
    for side, size in (("source", 64_000), ("target", 32_000)):
        check = checks.Integer(MIN_SIZE)
        flags.DEFINE_integer(f"{side}_size", size, f"ids of the {side} vocabulary", check)
    define_symbols_flag(flags)
    help = "with a larger one small languages count more"
    flags.DEFINE_float("temperature", VocabOptions.temperature, help, checks.POSITIVE)
    flags.DEFINE_integer(
        "max_sentences",
        VocabOptions.max_sentences,
        "sentences in the sample at most, held in memory",
        checks.Integer(MIN_SENTENCES),
    )
    return flags


def define_symbols_flag(flags: Flags) -> None:
    help = "texts that stay whole, as placeholders, e.g. '<ph1>,<ph2>': each is a piece of both vocabularies"
    flags.DEFINE_list("user_symbols", (), help)


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("train_vocab", lambda: _run(args))


def _run(args: Flags) -> int:
    def progress(message: str) -> None:
        print(f"  {message}", flush=True)

    _cli.check_output_directory(args.output)
    check_symbols(args.user_symbols)
    options = VocabOptions(
        args.source_size,
        args.target_size,
        args.temperature,
        args.max_sentences,
        name="--{side}_size",
        symbols=args.user_symbols,
    )
    with tempfile.TemporaryDirectory() as cache:
        corpus = scan(args.data_dir, args.languages, progress)
        vocabularies = cached_vocabularies(corpus, options, cache, progress)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    for side, vocabulary in vocabularies.items():
        write_listed(output / f"{side}.model", vocabulary.model_bytes)
    print(f"source.model has {args.source_size} ids, target.model {args.target_size}")
    _cli.made(
        args.output,
        next=f"python -m lingvo_moe.trainer --model=mt.M4Demo --data_dir={args.data_dir} --logdir=RUN "
        f"--model_params_override=input.vocab_dir={args.output}",
    )
    return 0


if __name__ == "__main__":
    _cli.run(main)
