"""Makes a training data set from parallel text: filters, removes duplicates, trains vocabularies, tokenises.

    python -m tools.prepare --input=TEXTS --output=DATA --model=mt.M4Demo
    python -m lingvo_moe.trainer --model=mt.M4Demo --data_dir=DATA --logdir=RUN

TEXTS holds de.tsv, de.csv, de.jsonl or de.parquet (one file per language), pairs.jsonl (mixed: each line names its
language), memory.tmx, a saved data set of Hugging Face, or pairs of files such as Europarl.de-en.de and
Europarl.de-en.en; texts are plain, .gz or .zst. TEXTS/dev/ may hold pairs for scoring;
otherwise some pairs are held out. After Ctrl-C or another interruption the same command resumes.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.command import as_typed, flags_line
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.console.waiting import LineProgress
from lingvo_moe.core.runs.directories import PREPARED
from lingvo_moe.tasks.text.batches.lengths import Loss
from lingvo_moe.tasks.text.data.shards import PAIRS_PER_SHARD
from lingvo_moe.tasks.text.preparing.filters import Rules
from lingvo_moe.tasks.text.preparing.lines import Fields, is_language
from lingvo_moe.tasks.text.preparing.prepare import PrepareOptions, prepare
from lingvo_moe.tasks.text.preparing.table import (
    all_languages,
    format_examples,
    format_lengths,
    format_table,
)
from lingvo_moe.tasks.text.vocabulary.vocab_cache import MIN_SENTENCES, VocabOptions
from lingvo_moe.tasks.text.vocabulary.vocabulary import MIN_SIZE, check_symbols
from lingvo_moe.training.flags import define_experiment_flag

from . import _cli
from .train_vocab import define_symbols_flag

_SIZES = {"source": 64_000, "target": 32_000}
_ROWS = "source_length", "target_length"  # those that an experiment's input has
_TRY = "mt.M4Tiny"  # what finds problems of data and machine in a minute


def define_flags() -> Flags:
    flags = Flags("python -m tools.prepare", __doc__)
    flags.DEFINE_multi_path("input", "a directory or a file of parallel text")
    flags.DEFINE_path(
        "output", None, "the directory to make; give it to the trainer as --data_dir", required=True
    )
    help = (
        "the experiment to train, e.g. mt.M4Demo, whose vocabulary sizes and temperature are used"
    )
    define_experiment_flag(flags, help, required=False)
    with flags.Section("reading"):
        _define_reading_flags(flags)
    with flags.Section("filters (besides those for empty, equal and duplicate pairs)"):
        _define_filter_flags(flags)
    with flags.Section("held-out pairs, where no input has a directory dev/"):
        _define_dev_flags(flags)
    with flags.Section("vocabularies and shards"):
        _define_size_flags(flags)
    return flags


def _define_reading_flags(flags: Flags) -> None:
    flags.DEFINE_parsed(
        "target_lang", "en", "the language that everything is translated into", _language
    )
    flags.DEFINE_list(
        "columns",
        ("source", "target"),
        "the columns of TSV files: source, target, lang (for files of mixed languages), _ for one to skip",
    )
    flags.DEFINE_parsed(
        "json_fields",
        (),
        "the JSON fields, or columns of CSV, Parquet and Arrow, with source, target and, in mixed files, language"
        " (default: source or src, target or tgt,"
        " lang or language; or fields named by the languages, alone or within 'translation')",
        _json_fields,
        "comma-separated",
    )
    flags.DEFINE_multi_string(
        "tfds",
        "a TensorFlow Datasets builder to read (its split train), e.g. opus/medical,"
        " or TranslateFolder:DIR for DIR/de.train.txt and DIR/en.train.txt",
    )


def _language(text: str) -> str:
    if not is_language(text):
        raise ValueError("must be the code of a language, e.g. en, zh-TW or sr_Latn")
    return text


def _json_fields(text: str) -> tuple[str, ...]:
    names = _cli.names(text)
    if len(names) not in (0, 2, 3):
        raise ValueError("must be two or three names")
    return names


def _define_filter_flags(flags: Flags) -> None:
    flags.DEFINE_integer("max_chars", 1000, "drop pairs with a longer side", checks.SIZE)
    flags.DEFINE_float(
        "max_ratio",
        float(Rules.max_ratio),
        "drop pairs with one side more than this many times as long as the other",
        checks.Number(1),
    )
    flags.DEFINE_boolean(
        "any_script",
        False,
        "keep texts in other scripts than the usual ones of their language, and files whose source and target seem to"
        " be in each other's place",
    )


def _define_dev_flags(flags: Flags) -> None:
    flags.DEFINE_float(
        "dev_share",
        None,
        "share of the target sentences to hold out, the same sentences in all languages; fewer of short ones"
        " (default: 0.05 for less than 10 MB of input, 0.02 for less than 100 MB, else 0.01)",
        checks.SHARE,
    )
    flags.DEFINE_integer(
        "max_dev",
        PrepareOptions.max_dev,
        "pairs of each language in dev/ at most; further ones are dropped",
        checks.SIZE,
    )


def _define_size_flags(flags: Flags) -> None:
    for side, size in _SIZES.items():
        text = f"ids of the {side} vocabulary (default: as --model, else {size})"
        flags.DEFINE_integer(f"{side}_vocab_size", None, text, checks.Integer(MIN_SIZE))
    define_symbols_flag(flags)
    flags.DEFINE_float(
        "temperature",
        None,
        "temperature T for sampling the vocabularies' text and for the table; with a larger one small languages count"
        " more (default: as --model, else 5)",
        checks.POSITIVE,
    )
    flags.DEFINE_integer(
        "vocab_sentences",
        None,
        "train vocabularies on at most this many pairs, held in memory (default: as --model, else 500000)",
        checks.Integer(MIN_SENTENCES),
    )
    flags.DEFINE_integer(
        "pairs_per_shard", PAIRS_PER_SHARD, "tokenised pairs in one file at most", checks.SIZE
    )
    flags.DEFINE_integer(
        "workers",
        min(os.cpu_count() or 1, 16),
        "processes, of some 200 MB each; two of them also hold the sample for the vocabularies",
        checks.Integer(1, 1024),
    )
    _cli.define_runner_flags(flags)
    flags.OnlyWith("workers", "the runner's options say how many it has", runner=False)


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if not args.input and not args.tfds:
        args.Fail("nothing to read: give --input or --tfds")
    logging.basicConfig(format="%(message)s")
    interrupted = "stopped; the same command resumes from here"
    return _cli.attempt("prepare", lambda: _run(args), interrupted)


def _run(args: Flags) -> int:
    start = time.monotonic()
    _cli.check_output_directory(args.output, replaces=PREPARED)
    experiment = _experiment(args.model) if args.model else None
    options = _options(args, experiment)
    with LineProgress() as progress:
        summary = prepare(args.input, args.output, options, progress)
    _report(args, summary, time.monotonic() - start)
    if experiment is not None:
        _print_next(args, summary, experiment)
    return 0


def _experiment(model: str) -> Params:
    """The parameters of the input of an experiment."""
    with _cli.quiet_imports():
        from lingvo_moe.core.config import registry

        return registry.GetParams(model).input


def _options(args: Flags, experiment: Params | None) -> PrepareOptions:
    sizes, temperature = dict(_SIZES), VocabOptions.temperature
    sentences = VocabOptions.max_sentences
    rows, texts = tuple[int, ...](), False
    if experiment is not None:
        sizes = {side: experiment.Get(f"{side}_vocab_size") for side in _SIZES}
        if not {*_SIZES} <= {*experiment.cls.VOCAB_SETTINGS} and args.source_vocab_size:
            raise ValueError(
                f"--source_vocab_size={args.source_vocab_size}: has no effect with --model={args.model}, which has one"
                " vocabulary, of --target_vocab_size"
            )
        temperature, sentences = experiment.temperature, experiment.vocab_sentences
        rows = tuple(experiment.Get(name) for name in _ROWS if name in experiment)
        texts = len(rows) == 1
    asked = {side: getattr(args, f"{side}_vocab_size") for side in _SIZES}
    sizes |= {side: size for side, size in asked.items() if size}
    check_symbols(args.user_symbols)
    names = dict(zip(("source", "target", "lang"), ((name,) for name in args.json_fields)))
    fields = Fields(columns=args.columns, target_lang=args.target_lang, texts=texts, **names)
    return PrepareOptions(
        VocabOptions(
            sizes["source"],
            sizes["target"],
            args.temperature or temperature,
            args.vocab_sentences or sentences,
            name="--{side}_vocab_size",
            symbols=args.user_symbols,
        ),
        fields,
        Rules(args.max_chars, args.max_ratio, not args.any_script, args.target_lang),
        args.dev_share,
        args.max_dev,
        args.pairs_per_shard,
        args.workers,
        tuple(args.tfds),
        _cli.beam_runner(args),
        rows,
    )


def _report(args: Flags, summary: dict[str, Any], seconds: float) -> None:
    print(f"{format_table(summary)}\n\n{format_lengths(summary)}")
    if examples := format_examples(summary):
        print(f"\n{examples}")
    pairs = sum(about["kept"] for about in summary["languages"].values())
    read = sum(about["read"] for about in all_languages(summary).values())
    print(
        f"\n{pairs:,} of {read:,} lines, {len(summary['languages'])} languages,"
        f" in {seconds:.0f} s; all of this, and more examples, in {Path(args.output) / 'prepared.json'}"
    )
    if unscored := [lang for lang, about in summary["languages"].items() if not about["dev"]]:
        print(
            f"no pairs are held out of {', '.join(unscored)}, so they cannot be scored: give a larger --dev_share,"
            " or pairs in a directory dev/ of the input"
        )


def _print_next(args: Flags, summary: dict[str, Any], experiment: Params) -> None:
    """Prints the trainer's command, with what was given here and differs from the experiment, and one for a try."""
    loss = Loss(**summary["row_lengths"]["loss"])
    if loss.matters:
        print(f"warning: of {args.model}'s rows: {loss}; the next command has this setting")
    rows = [loss.settings] if loss.matters else []
    command = _trainer_command(args, summary, args.model, experiment, "RUN", rows)
    _cli.made(args.output, next=command)
    if args.model.startswith("mt.") and args.model != _TRY:
        tiny = _experiment(_TRY)
        enough = zip(_SIZES, summary["row_lengths"]["enough"])
        lengths = {f"{side}_length": length for side, length in enough}
        rows = [f"input.{name}={n}" for name, n in lengths.items() if n > tiny.Get(name)]
        command = _trainer_command(args, summary, _TRY, tiny, "TRY", rows)
        print(as_typed(f"or first, in a minute or two, to find problems: {command}"))


def _trainer_command(
    args: Flags,
    summary: dict[str, Any],
    model: str,
    experiment: Params,
    logdir: str,
    rows: Sequence[str],
) -> str:
    """The command that trains an experiment on the prepared data; `rows` are overrides that make its rows longer."""
    override = [
        experiment.cls.VOCAB_SETTINGS[side].format(most=size)
        for side, size in summary["vocabularies"].items()
        if side in experiment.cls.VOCAB_SETTINGS and size != experiment.Get(f"{side}_vocab_size")
    ]
    if args.temperature and args.temperature != experiment.temperature:
        override.append(f"input.temperature={args.temperature:g}")
    override += rows
    flags = {"data_dir": args.output, "logdir": logdir, "model_params_override": ";".join(override)}
    return f"python -m lingvo_moe.trainer {flags_line(model=model, **flags)}"


if __name__ == "__main__":
    _cli.run(main)
