"""Trains the source and target vocabularies of a corpus; writes `source.model` and `target.model`, with their SHA-256.

    python -m tools.train_vocab --data_dir=corpus --output=vocab --source_size=32000 --target_size=16000

A run uses them with `--model_params_override='input.vocab_dir=vocab'`; without, it trains its own.
"""

import sys
import tempfile
from pathlib import Path

from lingvo_moe.core import checks
from lingvo_moe.tasks.mt.input.file_list import write_listed
from lingvo_moe.tasks.mt.input.scan import scan
from lingvo_moe.tasks.mt.input.vocab_cache import MIN_SENTENCES, VocabOptions, cached_vocabularies
from lingvo_moe.tasks.mt.input.vocabulary import MIN_SIZE
from tools import _cli


def main(argv: list[str] | None = None) -> int:
    parser = _cli.Parser(prog="python -m tools.train_vocab", description=__doc__)
    parser.add_argument(
        "--data_dir", type=_cli.local_path, required=True, help="directory of <lang>.tsv.gz"
    )
    parser.add_argument(
        "--output", type=_cli.local_path, required=True, help="directory for the two models"
    )
    parser.add_argument(
        "--languages", type=_cli.names, default=(), help="e.g. de,sw (default: all)"
    )
    for side, size in (("source", 64_000), ("target", 32_000)):
        text = f"ids of the {side} vocabulary (%(default)s)"
        parser.add_argument(f"--{side}_size", type=int, default=size, help=text)
    parser.add_argument(
        "--temperature",
        type=float,
        default=5.0,
        help="larger: small languages count more (%(default)s)",
    )
    parser.add_argument(
        "--max_sentences",
        type=int,
        default=500_000,
        help="cap on the sample held in memory (%(default)s)",
    )
    args = parser.parse_args(argv)
    least = {"source_size": MIN_SIZE, "target_size": MIN_SIZE, "max_sentences": MIN_SENTENCES}
    _cli.check_at_least(parser, args, **least)
    _cli.check_numbers(parser, args, temperature=checks.POSITIVE)
    options = VocabOptions(
        args.source_size,
        args.target_size,
        args.temperature,
        args.max_sentences,
        name="--{side}_size",
    )

    def progress(message: str) -> None:
        print(f"  {message}", flush=True)

    try:
        _cli.check_output_directory(args.output)
        with tempfile.TemporaryDirectory() as cache:
            vocabularies = cached_vocabularies(
                scan(args.data_dir, args.languages, progress), options, cache, progress
            )
        output = Path(args.output)
        output.mkdir(parents=True, exist_ok=True)
        for side, vocabulary in vocabularies.items():
            write_listed(output / f"{side}.model", vocabulary.model_bytes)
    except (ValueError, OSError) as e:
        print(f"train_vocab: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(
        f"{args.output}: source.model ({args.source_size} ids), target.model ({args.target_size} ids)"
    )
    return 0


if __name__ == "__main__":
    _cli.run(main)
