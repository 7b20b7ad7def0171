"""Builds the corpus X -> English from installed packages.

python -m tools.build_corpus --output=corpus
python -m tools.build_corpus --output=small --langs=de,sw,ja --packages=Babel,Django
"""

import argparse
import sys
import time

from lingvo_moe.tasks.mt.input.corpus import CorpusOptions, build_corpus
from lingvo_moe.tasks.mt.input.errors import DataError


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def main(argv: list[str] | None = None) -> int:
    defaults = CorpusOptions()
    parser = argparse.ArgumentParser(
        prog="python -m tools.build_corpus", description="Builds a corpus from installed packages."
    )
    parser.add_argument(
        "--output", required=True, help="directory to write; an older corpus is replaced"
    )
    parser.add_argument(
        "--langs", type=_names, default=(), help="e.g. de,sw (default: all with enough pairs)"
    )
    parser.add_argument("--packages", type=_names, default=defaults.packages, help="%(default)s")
    parser.add_argument("--max_per_language", type=int, default=defaults.max_per_language)
    parser.add_argument("--max_dev_per_language", type=int, default=defaults.max_dev_per_language)
    parser.add_argument("--min_pairs", type=int, default=defaults.min_pairs)
    args = vars(parser.parse_args(argv))
    output = args.pop("output")
    start = time.monotonic()
    try:
        counts = build_corpus(
            output,
            CorpusOptions(**args),
            lambda lang, train, dev: print(
                f"  {lang:<4} {train:>6} pairs, {dev:>4} dev", flush=True
            ),
        )
    except (DataError, OSError) as e:
        print(f"build_corpus: {e}", file=sys.stderr)
        return 1
    total, dev = (sum(column) for column in zip(*counts.values()))
    seconds = time.monotonic() - start
    print(
        f"{output}: {len(counts)} languages, {total} pairs and {dev} dev pairs, in {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
