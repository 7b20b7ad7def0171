"""Makes a data set to train on out of parallel text: filtered, without duplicates, tokenised, with vocabularies.

    python -m tools.prepare --input=TEXTS --output=DATA --model=mt.M4Demo
    python -m lingvo_moe.trainer --model=mt.M4Demo --data_dir=DATA --logdir=RUN

TEXTS holds de.tsv or de.jsonl (a file a language), pairs.jsonl (mixed: each line names its language), or files side by
side as Europarl.de-en.de and Europarl.de-en.en; each plain, .gz or .zst. TEXTS/dev/ holds pairs to score with, where
you have them; else some are held out. Stopped with Ctrl-C or otherwise, the same command goes on.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from lingvo_moe.core import checks
from lingvo_moe.core.directories import PREPARED
from lingvo_moe.tasks.mt.input.preparing.filters import Rules
from lingvo_moe.tasks.mt.input.preparing.prepare import PrepareOptions, prepare
from lingvo_moe.tasks.mt.input.preparing.sources import Fields
from lingvo_moe.tasks.mt.input.preparing.table import all_languages, format_examples, format_table
from lingvo_moe.tasks.mt.input.shards import PAIRS_PER_SHARD
from lingvo_moe.tasks.mt.input.vocab_cache import MIN_SENTENCES, VocabOptions
from lingvo_moe.tasks.mt.input.vocabulary import MIN_SIZE
from tools import _cli

_SIZES = {"source": 64_000, "target": 32_000}


def _parser() -> _cli.Parser:
    parser = _cli.Parser(prog="python -m tools.prepare", description=__doc__)
    add = parser.add_argument
    add(
        "--input",
        type=_cli.local_path,
        action="append",
        default=[],
        metavar="PATH",
        help="directory or file of parallel text; may be given several times",
    )
    add(
        "--output",
        type=_cli.local_path,
        required=True,
        metavar="DATA",
        help="directory to make; give it as --data_dir",
    )
    add(
        "--model",
        metavar="NAME",
        help="experiment to train, e.g. mt.M4Demo: sizes of vocabularies and temperature are its own",
    )
    _add_reading_flags(parser.add_argument_group("reading"))
    group = parser.add_argument_group("what is left out (besides empty, equal and duplicate pairs)")
    _add_filter_flags(group)
    group = parser.add_argument_group("what is held out, where no input has a directory dev/")
    _add_dev_flags(group)
    _add_size_flags(parser.add_argument_group("vocabularies and shards"))
    return parser


def _add_reading_flags(group: Any) -> None:
    add = group.add_argument
    add("--target_lang", default="en", help="language that all is translated into (%(default)s)")
    add(
        "--columns",
        type=_cli.names,
        default=("source", "target"),
        metavar="A,B",
        help="what the columns of TSVs are: source, target, lang (then files are mixed), _ for one to skip"
        " (source,target)",
    )
    add(
        "--json_fields",
        type=_cli.names,
        default=(),
        metavar="S,T,L",
        help="names of the fields with source, target and, in mixed files, language (source or src, target or tgt,"
        " lang or language; or fields named by the languages, alone or within 'translation')",
    )
    add(
        "--tfds",
        action="append",
        default=[],
        metavar="NAME",
        help="TensorFlow Datasets builder to read (its split train), e.g. opus/medical,"
        " or TranslateFolder:DIR for DIR/de.train.txt and DIR/en.train.txt; may be given several times",
    )


def _add_filter_flags(group: Any) -> None:
    add = group.add_argument
    add("--max_chars", type=int, default=1000, help="pairs with a longer side (%(default)s)")
    add(
        "--max_ratio",
        type=float,
        default=Rules.max_ratio,
        help="pairs with a side this many times as long as the other (%(default)s)",
    )
    add(
        "--any_script",
        action="store_true",
        help="keep texts in other scripts than their language's",
    )


def _add_dev_flags(group: Any) -> None:
    add = group.add_argument
    add(
        "--dev_share",
        type=float,
        help="share of target sentences, held out of all languages alike; of short ones less"
        " (default: 0.05 of less than 10 MB of input, 0.02 of less than 100 MB, else 0.01)",
    )
    add(
        "--max_dev",
        type=int,
        default=PrepareOptions.max_dev,
        help="pairs a language that go into dev/; further ones are dropped (%(default)s)",
    )


def _add_size_flags(group: Any) -> None:
    add = group.add_argument
    for side, size in _SIZES.items():
        text = f"ids of the {side} vocabulary (default: as --model, else {size})"
        add(f"--{side}_vocab_size", type=int, help=text)
    add(
        "--temperature",
        type=float,
        help="T of the vocabularies' sample and of the table; larger: small languages count more"
        " (default: as --model, else 5)",
    )
    add(
        "--vocab_sentences",
        type=int,
        help="the most pairs that vocabularies are trained from, held in memory (default: as --model, else 500000)",
    )
    add(
        "--pairs_per_shard",
        type=int,
        default=PAIRS_PER_SHARD,
        help="the most pairs in a file of tokenised pairs (%(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=min(os.cpu_count() or 1, 16),
        help="processes, with some 200 MB each, and the sample for the vocabularies in two of them (%(default)s)",
    )


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    least = {f"{side}_vocab_size": MIN_SIZE for side in _SIZES}
    least |= {"max_chars": 1, "max_dev": 1, "pairs_per_shard": 1}
    _cli.check_at_least(parser, args, vocab_sentences=MIN_SENTENCES, max_ratio=1, **least)
    _cli.check_numbers(
        parser,
        args,
        dev_share=checks.SHARE,
        temperature=checks.POSITIVE,
        workers=checks.Integer(1, 1024),
    )
    if not args.input and not args.tfds:
        parser.error("nothing to read: give --input or --tfds")
    if args.json_fields and len(args.json_fields) not in (2, 3):
        parser.error(f"--json_fields={','.join(args.json_fields)}: name two fields or three")
    logging.basicConfig(format="%(message)s")
    start = time.monotonic()
    from lingvo_moe.core.engine.progress import LineProgress

    try:
        _cli.check_output_directory(args.output, replaces=PREPARED)
        options = _options(args)
        with LineProgress() as progress:
            summary = prepare(args.input, args.output, options, progress)
    except (ValueError, OSError) as e:
        print(f"prepare: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prepare: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    _report(args, summary, time.monotonic() - start)
    return 0


def _options(args: Any) -> PrepareOptions:
    sizes, temperature, sentences = dict(_SIZES), 5.0, 500_000
    if args.model:
        with _cli.quiet_imports():
            from lingvo_moe.core import registry

            p = registry.GetParams(args.model).input
        sizes = {side: p.Get(f"{side}_vocab_size") for side in _SIZES}
        temperature, sentences = p.temperature, p.vocab_sentences
    given = {side: getattr(args, f"{side}_vocab_size") for side in _SIZES}
    sizes |= {side: size for side, size in given.items() if size}
    fields = Fields(columns=args.columns, target_lang=args.target_lang)
    if args.json_fields:
        names = dict(zip(("source", "target", "lang"), ((name,) for name in args.json_fields)))
        fields = Fields(columns=args.columns, target_lang=args.target_lang, **names)
    return PrepareOptions(
        VocabOptions(
            sizes["source"],
            sizes["target"],
            args.temperature or temperature,
            args.vocab_sentences or sentences,
            name="--{side}_vocab_size",
        ),
        fields,
        Rules(args.max_chars, args.max_ratio, not args.any_script, args.target_lang),
        args.dev_share,
        args.max_dev,
        args.pairs_per_shard,
        args.workers,
        tuple(args.tfds),
    )


def _report(args: Any, summary: dict[str, Any], seconds: float) -> None:
    print(format_table(summary))
    if examples := format_examples(summary):
        print(f"\n{examples}")
    kept = sum(about["kept"] for about in summary["languages"].values())
    read = sum(about["read"] for about in all_languages(summary).values())
    print(
        f"\n{args.output}: {kept:,} of {read:,} lines, {len(summary['languages'])} languages,"
        f" in {seconds:.0f} s; all of this, and more examples, in {Path(args.output) / 'prepared.json'}"
    )
    if unscored := [lang for lang, about in summary["languages"].items() if not about["dev"]]:
        print(
            f"no pairs are held out of {', '.join(unscored)}, so nothing can score them: give a larger --dev_share,"
            " or pairs in a directory dev/ of the input"
        )
    sizes = summary["vocabularies"]
    if args.model:
        override = [
            f"{part}.{side}_vocab_size={sizes[side]}"
            for side in _SIZES
            if getattr(args, f"{side}_vocab_size")
            for part in ("input", "task")
        ]
        extra = f" --model_params_override={json.dumps(';'.join(override))}" if override else ""
        print(
            f"next: python -m lingvo_moe.trainer --model={args.model} --data_dir={args.output} --logdir=RUN{extra}"
        )


if __name__ == "__main__":
    _cli.run(main)
