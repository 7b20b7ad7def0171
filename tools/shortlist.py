"""Makes a vocabulary shortlist: the few target tokens that are scored for a line, instead of all.

    python -m tools.shortlist --logdir=RUN --output=RUN/shortlist.npz
    python -m tools.export --logdir=RUN --shortlist=RUN/shortlist.npz --output=MODEL

For each piece of the source vocabulary the file holds the target pieces that most likely translate it, by IBM model 1
on a sample of the training pairs. For every line it adds the most frequent target pieces, and those of single bytes, so
that anything can be spelt. It works with the vocabularies of RUN and no others, and with every checkpoint of RUN.

The last line prints how many tokens of the held-out references are within their line's shortlist: others cannot be
produced. A larger --per_piece covers more and is slower. tools.evaluate --shortlist measures the effect on scores.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.console.waiting import LineProgress

from . import _cli

if TYPE_CHECKING:  # it imports NumPy
    from lingvo_moe.tasks.text.data.dev_set import DevSet


def define_flags() -> Flags:
    flags = Flags("python -m tools.shortlist", __doc__)
    _cli.define_logdir_flag(flags)
    flags.DEFINE_path("output", None, "the file to write, .npz", required=True)
    _cli.define_data_flag(flags)
    flags.DEFINE_integer("per_piece", 100, "target pieces of each source piece", checks.SIZE)
    flags.DEFINE_integer("frequent", 200, "frequent target pieces for every line", checks.COUNT)
    flags.DEFINE_integer("max_pairs", 300_000, "pairs to draw, held in memory", checks.SIZE)
    _cli.define_trust_flag(flags)
    _cli.define_quiet_flag(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("shortlist", lambda: _run(args), "interrupted; nothing was written")


def _run(args: Flags) -> int:
    _cli.check_output_file(args.output)
    with _cli.quiet_imports():  # the experiment's modules are TensorFlow's first users
        from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

        run = TextRunDir(args.logdir, trust_run=args.trust_run)
        inputs = run.Params().input
    from lingvo_moe.tasks.mt.decoding.making_shortlists import (
        ShortlistOptions,
        coverage,
        make_shortlist,
    )
    from lingvo_moe.tasks.text.data.errors import DataError

    vocabs = run.OpenVocabularies()
    data_dir = _cli.data_dir(args, inputs)
    options = ShortlistOptions(args.per_piece, args.frequent, args.max_pairs, inputs.temperature)
    with LineProgress() as show:
        say = (lambda text: None) if args.quiet else (lambda text: show(f"shortlist: {text}"))
        shortlist = make_shortlist(vocabs, data_dir, inputs.languages, options, say)
        shortlist.Save(args.output)
        try:
            held_out = _held_out(data_dir, inputs.languages)
        except DataError as e:
            held_out, why = None, str(e)
        covered = held_out and coverage(shortlist, vocabs, held_out.items(), say)
    about = shortlist.About()
    print(
        f"{about['per_source_piece']} of {vocabs.target.size:,} target pieces for each of"
        f" {vocabs.source.size:,} source pieces, {about['every_line']} for every line"
    )
    if covered:
        print(
            f"of {covered.tokens:,} tokens of {covered.lines:,} held-out references"
            f" {covered.inside / max(covered.tokens, 1):.1%} are within their line's shortlist, of"
            f" {covered.size:,.0f} pieces on average"
        )
    else:
        print(f"coverage was not measured: {why}")
    command = f"python -m tools.translate --logdir={args.logdir} --shortlist={args.output}"
    _cli.made(args.output, next=command)
    return 0


def _held_out(data_dir: str, languages: Sequence[str]) -> "DevSet":
    """The DevSet of the languages that have dev pairs; no languages mean all. Raises DataError: none of them has."""
    from lingvo_moe.tasks.text.data.dev_set import DevSet
    from lingvo_moe.tasks.text.data.errors import DataError

    with_pairs = [lang for lang in DevSet(data_dir).languages if not languages or lang in languages]
    if not with_pairs:
        raise DataError(f"{data_dir} has no held-out pairs of {', '.join(languages)}")
    return DevSet(data_dir, languages=with_pairs)


if __name__ == "__main__":
    _cli.run(main)
