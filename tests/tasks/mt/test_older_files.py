"""A run and an export, both written by version 0.1.0 on 2026-11-29, load and give the numbers that they gave then.

The run is of mt.M4Tiny with `model_dim=8`, one block of two layers on each side, and 40 pieces without normalization.
"""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator
from lingvo_moe.tasks.text.quality.forced_decoding import Scorer

pytestmark = pytest.mark.slow

TESTDATA = Path(__file__).parent / "testdata"
OPTIONS = TranslateOptions(beam_size=2, max_source_length=8, max_length=8, rows=2)
LINES = ["red green house", "open file"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("older")
    for name in ("run", "export"):
        with tarfile.open(TESTDATA / f"{name}.tar.xz") as packed:
            packed.extractall(root, filter="data")
    return root


def _translates_as_then(translator):
    out = translator.Translate(LINES)
    assert out.translations == [["tree tree tree tree tree treeu"], ["openu openu openu house"]]
    np.testing.assert_allclose(out.scores, [[-8.00924015], [-10.11225605]], rtol=1e-5)


def test_an_older_checkpoint_translates_and_scores_as_it_did(files):
    _translates_as_then(load_translator(files / "run", OPTIONS)[0])
    scores = Scorer(files / "run").Score(LINES, ["tree stone", "view"])
    want = [-13.35216999, -13.52788448]
    np.testing.assert_allclose([score.log_prob for score in scores], want, rtol=1e-5)


def test_an_older_export_translates_as_it_did(files):
    _translates_as_then(SavedTranslator(files / "export"))
