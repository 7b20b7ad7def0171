"""Tells how likely a model finds given translations: a log-probability for each line, nothing is searched.

    python -m tools.score --logdir=RUN <pairs.tsv >scores.tsv
    python -m tools.score --logdir=RUN --input=pairs.tsv --output=scores.tsv --tokens

A line in is source<TAB>target; more columns are not looked at. A line out is, with tabs between, the log-probability of
the target (nats), its tokens (the end of the sentence is one), and the mean of a token; with --tokens also each
token as piece:log-probability. There are as many lines out as in: one without a TAB gets nan, 0, nan.
"""

import sys
from typing import Any

from lingvo_moe.tasks.mt.decoding.line_stream import Line
from tools import _cli, _lines


def main(argv: list[str] | None = None) -> int:
    parser = _cli.Parser(prog="python -m tools.score", description=__doc__)
    parser.add_argument(
        "--logdir",
        type=_cli.portable_path,
        metavar="RUN",
        required=True,
        help="a run, as given to the trainer",
    )
    parser.add_argument("--tokens", action="store_true", help="also the score of each token")
    _cli.add_run_flags(parser)
    parser.add_argument(
        "--max_source_length", type=int, default=256, help="tokens; the rest is cut (%(default)s)"
    )
    parser.add_argument(
        "--max_length", type=int, default=256, help="tokens of a target, likewise (%(default)s)"
    )
    _lines.add_flags(parser, "pairs to score")
    args = parser.parse_args(argv)
    _cli.check_at_least(parser, args, batch_size=1)
    try:
        return _run(args)
    except (ValueError, OSError) as e:
        print(f"score: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(args: Any) -> int:
    with _lines.opened(args) as (source, sink):
        _cli.load_tensorflow()
        scorer = _open(args)

        def answer(lines: list[Line]) -> list[tuple[str, str]]:
            return _answer(scorer, lines, args.language, args.tokens)

        return _lines.answer_all("score", args, answer, source, sink)


def _open(args: Any) -> Any:
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
