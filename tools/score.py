"""Scores given translations or texts: prints the log-probability that a model gives to each. Nothing is searched.

    python -m tools.score --logdir=RUN <pairs.tsv >scores.tsv
    python -m tools.score --logdir=RUN --input=pairs.tsv --output=scores.tsv --tokens

An input line is source<TAB>target; of further columns only that of --language_column is used. An output line has,
separated by tabs, the log-probability of the target (nats), the number of its tokens (the end of the sentence is one),
and the mean per token; with --tokens also each token as piece:log-probability. Every input line gets an output line:
one without a TAB gets nan, 0, nan. At the end, standard error gets the mean loss (nats a target token) and the
perplexity of each language.

With the run of a language model a line is a text, or a JSON object with one (--field), and the end also has the bits
for each byte, newlines included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.decode.ranges import LENGTH
from lingvo_moe.tasks.mt.quality.intervals import ENOUGH_LINES, FEW, has_few
from lingvo_moe.tasks.text.decoding.line_stream import Line

from . import _cli, _lines, _mesh, _published

if TYPE_CHECKING:  # they import TensorFlow
    from lingvo_moe.tasks.text.quality.forced_decoding import Score, Scorer

_MOST_LANGUAGES = 1000


@dataclass
class Losses:
    """Sums over scored pairs, by language ('' where none was named): pairs, tokens, log-probability in nats.

    Attributes:
        whole: of the texts of a language model that were not truncated: bytes, log-probability.
    """

    sums: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    whole: tuple[int, float] = (0, 0.0)

    def AddText(self, log_prob: float, tokens: int, size: int | None) -> None:
        """Adds a text of `size` bytes; None: of some of it alone."""
        self.Add("", log_prob, tokens)
        if size is not None:
            self.whole = self.whole[0] + size, self.whole[1] + log_prob

    def Add(self, language: str, log_prob: float, tokens: int) -> None:
        """Adds a pair. Raises ValueError for more names than there are languages in any data."""
        pairs, before, total = self.sums.get(language, (0, 0, 0.0))
        self.sums[language] = pairs + 1, before + tokens, total + log_prob
        if len(self.sums) > _MOST_LANGUAGES:
            raise ValueError(
                f"--language_column: more than {_MOST_LANGUAGES:,} different languages, the last one "
                f"{language!r}: name the column of the source language"
            )

    def Lines(self) -> list[str]:
        """A line for each language, and one for all where they are several."""
        named = {name or "all": sums for name, sums in sorted(self.sums.items())}
        if len(named) > 1:
            pairs, tokens, totals = zip(*named.values(), strict=True)
            named["all"] = sum(pairs), sum(tokens), sum(totals)
        size, log_prob = self.whole
        if size:
            texts, number, loss = named["all"]
            bits = -log_prob / size / math.log(2)
            return [
                f"{texts:,} texts, {number:,} tokens, mean loss {-loss / number:.3f} nats a token, perplexity "
                f"{_exp(-loss / number):,.2f}, {bits:.3f} bits a byte"
            ]
        few = [name for name, (pairs, *_) in named.items() if has_few(pairs)]
        lines = [
            f"{name}{FEW * (name in few)}: {pairs:,} pairs, {tokens:,} tokens, mean loss "
            f"{-total / tokens:.3f} nats a token, perplexity {_exp(-total / tokens):,.2f}"
            for name, (pairs, tokens, total) in named.items()
        ]
        return lines + [f"{FEW} marks fewer than {ENOUGH_LINES} pairs"] * bool(few)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def define_flags() -> Flags:
    flags = Flags("python -m tools.score", __doc__)
    _cli.define_logdir_flag(flags)
    _published.define_from_flag(flags)
    flags.DEFINE_boolean("tokens", False, "also print the score of each token")
    _cli.define_run_flags(flags)
    _mesh.define_flags(flags)
    truncated = "longer ones are truncated"
    flags.DEFINE_integer("max_source_length", 256, f"tokens of a source; {truncated}", LENGTH)
    flags.DEFINE_integer("max_length", 256, f"tokens of a target; {truncated}", LENGTH)
    flags.DEFINE_integer(
        "language_column",
        None,
        "the column of the input that has each pair's source language, 3 or more (default: --language for all)",
        checks.Integer(3),
    )
    _lines.define_flags(flags, "pairs to score")
    _lines.define_field_flag(flags)
    flags.OnlyWith("language", "a column has that of each pair", language_column=False)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _mesh.attempt("score", lambda: _run(args))


def _run(args: Flags) -> int:
    losses = Losses()
    with _lines.opened(args) as (source, sink):
        _mesh.load_tensorflow(args)
        _published.imported(args)
        scorer = _open(args)
        texts_of = _lines.text_reader(args)
        if scorer.scores_texts:
            _refuse(args, "language", "language_column", "max_source_length")
        elif args.field:
            raise ValueError(
                f"--field={args.field}: {args.logdir} is not of a language model; give lines of pairs"
            )

        def answer(lines: list[Line]) -> list[tuple[str, str]]:
            if scorer.scores_texts:
                return _answer_texts(scorer, lines, texts_of(lines), args.tokens, losses)
            return _answer(scorer, lines, args, losses)

        status = _lines.answer_all("score", args, answer, source, sink)
    if status == 0 and not args.quiet:
        for line in losses.Lines():
            say(f"score: {line}")
    return status


def _open(args: Flags) -> "Scorer":
    from lingvo_moe.tasks.text.quality.forced_decoding import ScoreOptions, Scorer

    options = ScoreOptions(args.max_source_length, args.max_length)
    engine = _mesh.engine_of(args)
    scorer = Scorer(args.logdir, options, _cli.chosen(args), args.trust_run, engine)
    _mesh.lead(scorer.mesh_scores)
    return scorer


def _answer(
    scorer: "Scorer", lines: list[Line], args: Flags, losses: Losses
) -> list[tuple[str, str]]:
    """(text, warning) of each line; adds the scores to `losses`."""
    columns = [line.text.decode("utf-8", "replace").split("\t") for line in lines]
    warnings = [_warning(column, args.language_column) for column in columns]
    pairs = [column for column, warning in zip(columns, warnings) if warning is None]
    names = [args.language or ""] * len(pairs)
    if args.language_column:
        names = [column[args.language_column - 1].strip() for column in pairs]
    languages = names if args.language_column else args.language
    scores = scorer.Score([c[0] for c in pairs], [c[1] for c in pairs], languages)
    for name, score in zip(names, scores, strict=True):
        losses.Add(name, score.log_prob, len(score.pieces))
    rest = iter(scores)
    return [
        ("nan\t0\tnan", warning)
        if warning is not None
        else _scored(next(rest), line.is_cut, args.tokens)
        for line, warning in zip(lines, warnings)
    ]


def _refuse(args: Flags, *names: str) -> None:
    """Raises ValueError if a flag is given that has no effect with a language model."""
    for name in names:
        if getattr(args, name) != args[name].default:
            what = f"--{name}={getattr(args, name)}: {args.logdir} is of a language model"
            raise ValueError(f"{what}, whose texts have no source; leave it out")


def _answer_texts(
    scorer: "Scorer", lines: list[Line], raw: list[bytes], tokens: bool, losses: Losses
) -> list[tuple[str, str]]:
    """(text, warning) of each line, of a given text; adds the scores to `losses`."""
    texts = [text.decode("utf-8", "replace").strip() for text in raw]
    scores = scorer.Score([""] * len(texts), texts)
    for text, line, score in zip(texts, lines, scores, strict=True):
        size = None if line.is_cut or score.truncated else len(text.encode()) + 1
        losses.AddText(score.log_prob, len(score.pieces), size)
    return [_scored(score, line.is_cut, tokens) for score, line in zip(scores, lines)]


def _warning(column: list[str], language_column: int | None) -> str | None:
    """The reason why a line is not scored, '' for a blank line; None if it is scored."""
    if len(column) < 2:
        return "is not scored: it has no TAB" if column[0].strip() else ""
    if language_column and not "".join(column[language_column - 1 : language_column]).strip():
        return f"is not scored: it has no language in column {language_column}"
    return None


def _scored(score: "Score", is_cut: bool, tokens: bool) -> tuple[str, str]:
    """(text, warning) of a line that is scored."""
    cells = [f"{score.log_prob:.6f}", str(len(score.pieces))]
    cells.append(f"{score.log_prob / len(score.pieces):.6f}")
    if tokens:
        pairs = zip(score.pieces, score.token_log_probs)
        cells.append(" ".join(f"{piece}:{value:.6f}" for piece, value in pairs))
    warning = "is too long: its end is not scored" if is_cut or score.truncated else ""
    return "\t".join(cells), warning


if __name__ == "__main__":
    _cli.run(main)
