"""Makes a vocabulary shortlist: which tokens a line is scored for when it is translated, instead of all.

    python -m tools.shortlist --logdir=RUN --output=RUN/shortlist.npz
    python -m tools.export --logdir=RUN --shortlist=RUN/shortlist.npz --output=MODEL

For each piece of the source vocabulary the file holds the target pieces that it is likeliest translated by, after IBM
model 1 on a sample of the training pairs; and for every line the most frequent target pieces, and those of single
bytes, so that anything can be spelt. It goes with the vocabularies of RUN and no others, with any checkpoint of it.

The last line says how many of the held-out references' tokens are within their line's shortlist: what is outside
cannot come out. More --per_piece covers more and is slower. What it does to scores, tools.evaluate --shortlist says.
"""

import sys
from collections.abc import Sequence
from typing import Any

from tools import _cli


def main(argv: list[str] | None = None) -> int:
    parser = _cli.Parser(prog="python -m tools.shortlist", description=__doc__)
    parser.add_argument(
        "--logdir",
        type=_cli.portable_path,
        required=True,
        metavar="RUN",
        help="a run, as given to the trainer",
    )
    parser.add_argument(
        "--output",
        type=_cli.local_path,
        required=True,
        metavar="FILE",
        help="the file to write, .npz",
    )
    parser.add_argument(
        "--data_dir",
        type=_cli.local_path,
        metavar="CORPUS",
        help="the pairs (default: what RUN trained on)",
    )
    parser.add_argument(
        "--per_piece", type=int, default=100, help="target pieces of a source piece (%(default)s)"
    )
    parser.add_argument(
        "--frequent", type=int, default=200, help="target pieces for every line (%(default)s)"
    )
    parser.add_argument(
        "--max_pairs", type=int, default=300_000, help="pairs to draw, all in memory (%(default)s)"
    )
    _cli.add_trust_flag(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    args = parser.parse_args(argv)
    _cli.check_at_least(parser, args, per_piece=1, frequent=0, max_pairs=1)
    try:
        return _run(args)
    except (ValueError, OSError) as e:
        print(f"shortlist: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("shortlist: interrupted; nothing was written", file=sys.stderr)
        return 130


def _run(args: Any) -> int:
    _cli.check_output_file(args.output)
    with _cli.quiet_imports():  # the experiment's modules are TensorFlow's first users
        from lingvo_moe.tasks.mt.runs.run_dir import RunDir

        run = RunDir(args.logdir, trust_run=args.trust_run)
        inputs = run.Params().input
    from lingvo_moe.core.engine.progress import LineProgress
    from lingvo_moe.core.nested_map import NestedMap
    from lingvo_moe.tasks.mt.decoding.making_shortlists import (
        ShortlistOptions,
        coverage,
        make_shortlist,
    )
    from lingvo_moe.tasks.mt.input.errors import DataError
    from lingvo_moe.tasks.mt.input.vocabulary import Vocabulary

    vocabs = NestedMap({side: Vocabulary(model) for side, model in run.vocabs.items()})
    data_dir = args.data_dir or inputs.data_dir
    options = ShortlistOptions(args.per_piece, args.frequent, args.max_pairs, inputs.temperature)
    with LineProgress() as show:
        say = (lambda text: None) if args.quiet else (lambda text: show(f"shortlist: {text}"))
        shortlist = make_shortlist(vocabs, data_dir, inputs.languages, options, say)
        shortlist.Save(args.output)
        try:
            held_out = _held_out(data_dir, inputs.languages)
        except DataError as e:
            held_out, why = None, str(e)
        of = held_out and coverage(shortlist, vocabs, held_out.items(), say)
    about = shortlist.About()
    print(
        f"{args.output}: {about['per_source_piece']} of {vocabs.target.size:,} target pieces for each of"
        f" {vocabs.source.size:,} source pieces, {about['every_line']} for every line"
    )
    if of:
        print(
            f"of {of.tokens:,} tokens of {of.lines:,} held-out references {of.inside / max(of.tokens, 1):.1%} are"
            f" within their line's shortlist, of {of.size:,.0f} pieces on the mean"
        )
    else:
        print(f"coverage was not looked at: {why}")
    return 0


def _held_out(data_dir: str, languages: Sequence[str]) -> Any:
    """The DevSet of a run's languages, none meaning all, as far as there is one. Raises DataError: there is none."""
    from lingvo_moe.tasks.mt.input.dev_set import DevSet
    from lingvo_moe.tasks.mt.input.errors import DataError

    found = [lang for lang in DevSet(data_dir).languages if not languages or lang in languages]
    if not found:
        raise DataError(f"{data_dir} has no held-out pairs of {', '.join(languages)}")
    return DevSet(data_dir, languages=found)


if __name__ == "__main__":
    _cli.run(main)
