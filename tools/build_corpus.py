"""Builds the corpus X -> English from installed packages.

python -m tools.build_corpus --output=corpus
python -m tools.build_corpus --output=small --languages=de,sw,ja --packages=Babel,Django
"""

import time
from collections.abc import Sequence

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.runs.directories import CORPUS
from lingvo_moe.tasks.text.corpus.corpus import CorpusOptions, build_corpus

from . import _cli


def define_flags() -> Flags:
    defaults = CorpusOptions()
    flags = Flags("python -m tools.build_corpus", __doc__)
    flags.DEFINE_path(
        "output", None, "the directory to write; it replaces an older corpus", required=True
    )
    flags.DEFINE_list("languages", (), "e.g. de,sw (default: all with enough pairs)")
    flags.DEFINE_list("packages", defaults.packages, "the packages to read")
    flags.DEFINE_integer(
        "max_per_language",
        defaults.max_per_language,
        "training pairs of each language at most: sentences, then shorter texts, then names",
        checks.SIZE,
    )
    flags.DEFINE_integer(
        "max_dev_per_language",
        defaults.max_dev_per_language,
        "dev pairs of each language at most, in the same order",
        checks.SIZE,
    )
    flags.DEFINE_integer(
        "min_pairs",
        defaults.min_pairs,
        "languages with fewer pairs are left out, unless --languages names them",
        checks.SIZE,
    )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("build_corpus", lambda: _run(args))


def _run(args: Flags) -> int:
    start = time.monotonic()
    _cli.check_output_directory(args.output, replaces=CORPUS)
    options = CorpusOptions(
        args.languages,
        args.packages,
        args.max_per_language,
        args.max_dev_per_language,
        args.min_pairs,
    )

    def progress(lang: str, train: int, dev: int) -> None:
        print(f"  {lang:<4} {train:>6} pairs, {dev:>4} dev", flush=True)

    built = build_corpus(args.output, options, progress)
    total, dev = (sum(column) for column in zip(*built.languages.values()))
    print(
        f"{len(built.languages)} languages, {total} pairs and {dev} dev pairs;"
        f" {built.english_sides} different English sides; in {time.monotonic() - start:.0f} s"
    )
    _cli.made(
        args.output,
        next=f"python -m lingvo_moe.trainer --model=mt.M4Demo --data_dir={args.output} --logdir=RUN",
    )
    return 0


if __name__ == "__main__":
    _cli.run(main)
