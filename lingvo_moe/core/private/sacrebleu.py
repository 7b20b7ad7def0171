"""The private parts of sacreBLEU that this project uses, each tested in tests/core/private."""

from collections.abc import Sequence

from sacrebleu.metrics.base import Metric
from sacrebleu.significance import _bootstrap_resample


def resampled_scores(
    metric: Metric, hypotheses: Sequence[str], references: Sequence[str], number: int
) -> list[float]:
    """The scores of bootstrap resamples of lines.

    corpus_score(..., n_bootstrap) fails where some resamples have a chrF of 0 and others have not.
    """
    statistics = metric._extract_corpus_statistics(hypotheses, [references])
    _, scores = _bootstrap_resample(statistics, metric, number)
    return [score.score for score in scores]
