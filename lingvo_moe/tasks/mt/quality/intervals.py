"""Confidence intervals of scores from bootstrap resampling, and the number of lines that are enough."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that only read ENOUGH_LINES start without sacreBLEU and NumPy
    from sacrebleu.metrics.base import Metric

# Those of BLEU that sacreBLEU has, and that are of a language or of all: see make_bleu.
TOKENIZERS = ("13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "flores101", "flores200")
# A score of fewer lines is marked wherever it is shown, and the mean of the language's group is to be read instead.
# Below some 50 short lines the interval of BLEU is wider than most differences between languages.
ENOUGH_LINES = 50
FEW = "*"  # marks such a score
RESAMPLES = 1000
# sacreBLEU holds the statistics of all resampled lines at once: 144 MB of chrF for so many.
_MOST_LINES = 2000


def has_few(lines: int) -> bool:
    """Whether a score of so many lines says little about its language."""
    return lines < ENOUGH_LINES


def margin(metric: "Metric", hypotheses: Sequence[str], references: Sequence[str]) -> float | None:
    """Half the width of the 95 % confidence interval of a corpus score, by sacreBLEU's bootstrap resampling.

    The same for the same lines: sacreBLEU's seed is 12345 unless SACREBLEU_SEED says otherwise. Of more than 2,000
    lines an even selection is resampled, and its margin is scaled by the square root of the numbers of lines; so the
    cost stays below a CPU second. 50 lines take 20 CPU ms.

    `metric`, a BLEU or CHRF, stays as it is.

    Returns:
        Points of the score, or None for fewer than two lines, which cannot be resampled.
    """
    import numpy as np
    from sacrebleu.significance import estimate_ci

    from lingvo_moe.core.private.sacrebleu import resampled_scores

    if len(hypotheses) < 2:
        return None
    some = slice(None, None, -(-len(hypotheses) // _MOST_LINES))
    chosen = hypotheses[some]
    scores = resampled_scores(metric, chosen, references[some], RESAMPLES)
    _, half_width = estimate_ci(np.array(scores, np.float64))
    return float(half_width) * (len(chosen) / len(hypotheses)) ** 0.5


def margin_of_mean(margins: Iterable[float | None]) -> float | None:
    """The margin of the unweighted mean of scores whose lines are independent; None if one of them has none."""
    squares = [None if m is None else m * m for m in margins]
    numbers = [square for square in squares if square is not None]
    if not numbers or len(numbers) < len(squares):
        return None
    return sum(numbers) ** 0.5 / len(numbers)


def with_margin(score: float, margin: float | None) -> str:
    """'13.7 ± 1.2'; '13.7' without a margin, or where all resamples agree: that would look certain."""
    agree = margin is not None and round(margin, 1) == 0
    return f"{score:.1f}" if margin is None or agree else f"{score:.1f} ± {margin:.1f}"


def footnote() -> str:
    """Explains the margins and the mark in a table of scores."""
    return (
        f"± is half of the 95 % confidence interval, from {RESAMPLES:,} bootstrap resamples of the lines. "
        f"{FEW} marks scores of fewer than {ENOUGH_LINES} lines, which say little; the mean of the group says more."
    )
