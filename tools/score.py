"""Scores given translations: prints the log-probability that a model gives to each. Nothing is searched.

    python -m tools.score --logdir=RUN <pairs.tsv >scores.tsv
    python -m tools.score --logdir=RUN --input=pairs.tsv --output=scores.tsv --tokens

An input line is source<TAB>target; further columns are ignored. An output line has, separated by tabs, the
log-probability of the target (nats), the number of its tokens (the end of the sentence is one), and the mean per token;
with --tokens also each token as piece:log-probability. Every input line gets an output line: one without a TAB gets
nan, 0, nan.
"""

from collections.abc import Sequence
from typing import Any

from lingvo_moe.core.decode.ranges import LENGTH
from lingvo_moe.core.flags import Flags
from lingvo_moe.tasks.mt.decoding.line_stream import Line
from tools import _cli, _lines


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m tools.score", __doc__)
    _cli.define_logdir_flag(flags)
    flags.DEFINE_boolean("tokens", False, "also print the score of each token")
    _cli.define_run_flags(flags)
    truncated = "longer ones are truncated"
    flags.DEFINE_integer("max_source_length", 256, f"tokens of a source; {truncated}", LENGTH)
    flags.DEFINE_integer("max_length", 256, f"tokens of a target; {truncated}", LENGTH)
    _lines.define_flags(flags, "pairs to score")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("score", lambda: _run(args))


def _run(args: Flags) -> int:
    with _lines.opened(args) as (source, sink):
        _cli.load_tensorflow()
        scorer = _open(args)

        def answer(lines: list[Line]) -> list[tuple[str, str]]:
            return _answer(scorer, lines, args.language, args.tokens)

        return _lines.answer_all("score", args, answer, source, sink)


def _open(args: Flags) -> Any:
    from lingvo_moe.tasks.mt.quality.forced_decoding import ScoreOptions, Scorer

    options = ScoreOptions(args.max_source_length, args.max_length)
    return Scorer(args.logdir, options, *_cli.checkpoint(args), args.trust_run)


def _answer(
    scorer: Any, lines: list[Line], language: str | None, tokens: bool
) -> list[tuple[str, str]]:
    """(text, warning) of each line."""
    columns = [line.text.decode("utf-8", "replace").split("\t") for line in lines]
    pairs = [column for column in columns if len(column) > 1]
    scores = iter(scorer.Score([c[0] for c in pairs], [c[1] for c in pairs], language))
    answers = []
    for line, column in zip(lines, columns):
        if len(column) < 2:
            is_blank = not column[0].strip()
            answers.append(("nan\t0\tnan", "" if is_blank else "is not scored: it has no TAB"))
            continue
        score = next(scores)
        cells = [f"{score.log_prob:.6f}", str(len(score.pieces))]
        cells.append(f"{score.log_prob / len(score.pieces):.6f}")
        if tokens:
            each = zip(score.pieces, score.token_log_probs)
            cells.append(" ".join(f"{piece}:{value:.6f}" for piece, value in each))
        is_cut = line.is_cut or score.truncated
        answers.append(("\t".join(cells), "is too long: its end is not scored" if is_cut else ""))
    return answers


if __name__ == "__main__":
    _cli.run(main)
