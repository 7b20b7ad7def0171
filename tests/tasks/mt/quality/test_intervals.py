"""Margins are sacreBLEU's, repeat, and shrink with more lines; few lines come last in their group."""

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from lingvo_moe.tasks.mt.quality import intervals, scoring

_WORDS = ["open", "the", "file", "close", "all", "windows", "and", "save", "your", "work", "now"]


def _texts(number: int) -> tuple[list[str], list[str]]:
    """Hypotheses and their references, which share most words."""
    rng = np.random.default_rng(number)
    references = [" ".join(rng.choice(_WORDS, rng.integers(4, 12))) for _ in range(number)]
    return [r.replace("file", "document") for r in references], references


@pytest.mark.parametrize("metric", [BLEU, CHRF])
def test_the_margin_is_sacrebleus(metric):
    hypotheses, references = _texts(60)
    ours = metric()
    scored = ours.corpus_score(hypotheses, [references])
    signature = str(ours.get_signature())
    found = intervals.margin(ours, hypotheses, references)
    theirs = metric().corpus_score(hypotheses, [references], n_bootstrap=intervals.RESAMPLES)
    assert found == pytest.approx(theirs._ci) and 1 < found < 20
    assert theirs.score == scored.score
    assert str(ours.get_signature()) == signature  # what baselines are compared by
    assert intervals.margin(metric(), hypotheses, references) == found


def test_many_lines_are_sampled(monkeypatch):
    hypotheses, references = _texts(1000)
    complete = intervals.margin(CHRF(), hypotheses, references)
    monkeypatch.setattr(intervals, "_MOST_LINES", 300)
    assert intervals.margin(CHRF(), hypotheses, references) == pytest.approx(complete, rel=0.25)
    few = intervals.margin(CHRF(), hypotheses[:60], references[:60])
    assert few / complete == pytest.approx((1000 / 60) ** 0.5, rel=0.5)


def test_some_resamples_score_nothing():
    """sacreBLEU's own corpus_score cannot take the mean of such resamples."""
    found = intervals.margin(CHRF(), ["x", "open"], ["yes", "open"])
    assert found == pytest.approx(50, abs=5)
    assert intervals.margin(CHRF(), ["x"], ["x"]) is None


def test_means_and_their_text():
    assert intervals.margin_of_mean([3.0, 4.0]) == pytest.approx(2.5)
    assert intervals.margin_of_mean([3.0, None]) is None and intervals.margin_of_mean([]) is None
    assert intervals.with_margin(13.66, 1.24) == "13.7 ± 1.2"
    assert intervals.with_margin(13.66, None) == "13.7"
    assert intervals.with_margin(0.0, 0.0) == "0.0"  # every resample is as bad


def test_languages_with_few_lines_follow_those_of_their_group():
    few = intervals.ENOUGH_LINES - 1
    pairs = {lang: [("open", "open the file")] * few for lang in ("a", "b", "c", "d")}
    pairs["b"] = pairs["b"] + pairs["b"][:1]
    counts = {"a": 40, "b": 30, "c": 20, "d": 10}
    options = scoring.EvalOptions(bounds=(25, 15))
    report = scoring.evaluate(lambda lines, _: lines, pairs.items(), counts, options)
    assert report.InOrder() == ["b", "a", "c", "d"]
    found = report.ToDict()
    assert [one["few_lines"] for one in found["languages"].values()] == [True, False, True, True]
    assert found["intervals"]["enough_lines"] == intervals.ENOUGH_LINES
    assert found["average"]["lines"] == 4 * few + 1
