"""The private parts of sacreBLEU do what core/private/sacrebleu.py says."""

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from lingvo_moe.core.private.sacrebleu import resampled_scores

_SAID = ["the cat sat on the mat today", "a dog is not a cat", "it rains in the north"]
_MEANT = ["the cat sat on the mat", "a dog is no cat", "it rains in the south"]


@pytest.mark.parametrize("metric", [BLEU(effective_order=True), CHRF()])
def test_lines_are_resampled_around_their_score(metric):
    scores = resampled_scores(metric, _SAID, _MEANT, 200)
    whole = metric.corpus_score(_SAID, [_MEANT]).score
    assert len(scores) == 200 and scores == resampled_scores(metric, _SAID, _MEANT, 200)
    assert min(scores) < whole < max(scores) and abs(np.mean(scores) - whole) < 5
