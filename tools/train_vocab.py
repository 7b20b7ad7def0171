"""Trains the source and target vocabularies of a corpus; writes `source.model` and `target.model`.

    python -m tools.train_vocab --data_dir=corpus --output=vocab --source_size=32000 --target_size=16000

A run uses them with `--model_params_override='input.vocab_dir=vocab'`; without, it trains its own.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from lingvo_moe.core.files import write_atomic
from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.input.scan import scan
from lingvo_moe.tasks.mt.input.vocab_cache import VocabOptions, cached_vocabularies


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_vocab",
        description="Trains SentencePiece vocabularies from a corpus.",
    )
    parser.add_argument("--data_dir", required=True, help="directory of <lang>.tsv.gz")
    parser.add_argument("--output", required=True, type=Path, help="directory for the two models")
    parser.add_argument("--source_size", type=int, default=64_000)
    parser.add_argument("--target_size", type=int, default=32_000)
    parser.add_argument(
        "--temperature", type=float, default=5.0, help="larger: small languages count more"
    )
    parser.add_argument(
        "--max_sentences", type=int, default=500_000, help="cap on the sample held in memory"
    )
    args = parser.parse_args(argv)
    options = VocabOptions(args.source_size, args.target_size, args.temperature, args.max_sentences)

    def progress(message: str) -> None:
        print(f"  {message}", flush=True)

    try:
        with tempfile.TemporaryDirectory() as cache:
            vocabularies = cached_vocabularies(
                scan(args.data_dir, (), progress), options, cache, progress
            )
        args.output.mkdir(parents=True, exist_ok=True)
        for side, vocabulary in vocabularies.items():
            write_atomic(args.output / f"{side}.model", vocabulary.model_bytes)
    except (DataError, OSError) as e:
        print(f"train_vocab: {e}", file=sys.stderr)
        return 1
    print(
        f"{args.output}: source.model ({args.source_size} ids), target.model ({args.target_size} ids)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
