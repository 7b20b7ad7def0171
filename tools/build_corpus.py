"""Builds the corpus X -> English from installed packages.

python -m tools.build_corpus --output=corpus
python -m tools.build_corpus --output=small --languages=de,sw,ja --packages=Babel,Django
"""

import sys
import time

from lingvo_moe.core.directories import CORPUS
from lingvo_moe.tasks.mt.input.corpus import CorpusOptions, build_corpus
from tools import _cli


def main(argv: list[str] | None = None) -> int:
    defaults = CorpusOptions()
    parser = _cli.Parser(prog="python -m tools.build_corpus", description=__doc__)
    parser.add_argument(
        "--output",
        type=_cli.local_path,
        required=True,
        help="directory to write; an older corpus is replaced",
    )
    parser.add_argument(
        "--languages",
        type=_cli.names,
        default=(),
        help="e.g. de,sw (default: all with enough pairs)",
    )
    parser.add_argument(
        "--packages",
        type=_cli.names,
        default=defaults.packages,
        help=f"what to read (default: {','.join(defaults.packages)})",
    )
    parser.add_argument(
        "--max_per_language",
        type=int,
        default=defaults.max_per_language,
        help="training pairs kept of a language, the longest (%(default)s)",
    )
    parser.add_argument(
        "--max_dev_per_language",
        type=int,
        default=defaults.max_dev_per_language,
        help="dev pairs kept of a language (%(default)s)",
    )
    parser.add_argument(
        "--min_pairs",
        type=int,
        default=defaults.min_pairs,
        help="languages with fewer are left out, unless asked for (%(default)s)",
    )
    args = parser.parse_args(argv)
    _cli.check_at_least(parser, args, max_per_language=1, max_dev_per_language=1, min_pairs=1)
    if not args.packages:
        parser.error("--packages is empty; name at least one, e.g. Babel")
    options = CorpusOptions(
        args.languages,
        args.packages,
        args.max_per_language,
        args.max_dev_per_language,
        args.min_pairs,
    )
    output = args.output
    start = time.monotonic()
    try:
        _cli.check_output_directory(output, replaces=CORPUS)
        counts = build_corpus(
            output,
            options,
            lambda lang, train, dev: print(
                f"  {lang:<4} {train:>6} pairs, {dev:>4} dev", flush=True
            ),
        )
    except (ValueError, OSError) as e:
        print(f"build_corpus: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    total, dev = (sum(column) for column in zip(*counts.values()))
    seconds = time.monotonic() - start
    print(
        f"{output}: {len(counts)} languages, {total} pairs and {dev} dev pairs, in {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    _cli.run(main)
