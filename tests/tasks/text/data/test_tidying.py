"""Texts are tidied alike in Python and in a graph, and a run's lines as its data were."""

import json
import unicodedata

import numpy as np
import pytest
import tensorflow as tf
import toy_translation as toy
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.text.data.tidying import sentence_key, tidy_text
from lingvo_moe.tasks.text.decoding.export import export
from lingvo_moe.tasks.text.decoding.tokenizer import tidy_strings
from lingvo_moe.tasks.text.preparing.filters import Rules
from lingvo_moe.tasks.text.preparing.lines import Fields
from lingvo_moe.tasks.text.preparing.prepare import PrepareOptions, prepare
from lingvo_moe.tasks.text.quality.forced_decoding import Scorer
from lingvo_moe.tasks.text.runs.artifacts import tidied_of
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.vocabulary.vocab_cache import VocabOptions

_CHARACTERS = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]


def _in_a_graph(texts: list[str], version: int) -> list[str]:
    found = tidy_strings(tf.constant([text.encode() for text in texts]), version).numpy()
    return [text.decode() for text in found]


@pytest.mark.parametrize("version", (0, 1, 2))
def test_every_character_is_tidied_alike_in_a_graph(version):
    texts = [f"a {c}e\u0301{c} {c}" for c in _CHARACTERS]
    assert _in_a_graph(texts, version) == [tidy_text(text, version) for text in texts]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=20), min_size=1))
def test_texts_are_tidied_alike_in_a_graph(texts):
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    want = [tidy_text(text) for text in texts]
    assert _in_a_graph(texts, 2) == want == [tidy_text(text) for text in want]


def test_what_nobody_sees_is_removed_and_what_joins_stays():
    gone = "\u00ad\u034f\u061c\u180e\u200b\u200e\u2060\u2064\u206a\u206f\ufdd0\ufeff\ufff9\ufffb\uffff\U0010ffff"
    assert tidy_text(f"a{gone}b") == "ab"
    assert (
        tidy_text(f"a{gone}b", 1)
        == "a" + gone.translate(dict.fromkeys(map(ord, "\u00ad\u200b\u200e\ufeff"))) + "b"
    )
    stays = "می\u200cخواهم क\u200dष \u2764\ufe0f \U000e0100"
    assert tidy_text(stays) == stays


@pytest.mark.parametrize("words", [
    ("लड़का", "लड़की", "लड़के"),
    ("ကာ", "ကိ"),
    ("កា", "កី"),
    ("กิน", "กัน"),
])  # fmt: skip
def test_words_that_differ_in_vowel_signs_have_different_keys(words):
    keys = [sentence_key(word) for word in words]
    assert keys == list(words)
    assert sentence_key(words[0], 1) == sentence_key(words[1], 1)  # as data made before are split


def test_keys_forget_what_is_no_letter():
    assert sentence_key("In 5 days, (really)! \u2764\ufe0f 1\ufe0f\u20e3") == "in days really"
    rows = [c for c in _CHARACTERS if not unicodedata.category(c).startswith("M")]
    differ = [c for c in rows if sentence_key(f"a{c}b", 1) != sentence_key(f"a{c}b")]
    # Their small form has a mark.
    assert all(any(map(unicodedata.combining, c.casefold())) for c in differ)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TextRunDir:
    """A run that does not say how its texts were tidied."""
    path = tmp_path_factory.mktemp("run")
    toy.save_run(path, toy.train_vocab(toy.sentences(200)), more=toy.SMALL)
    return TextRunDir(path)


def _tidied(run: TextRunDir, version: int) -> None:
    found, experiment = run.artifacts, run.experiment
    about = RunArtifacts(found.files, {**found.about, "tidied": version})
    run.Write(experiment["model"], experiment["params_override"], about)


def test_lines_of_a_model_are_tidied_as_its_data_were(run, tmp_path):
    plain = [f"{line} café" for line in toy.sentences(3)]
    untidy = [
        unicodedata.normalize("NFD", line).replace(" ", "\u00a0").replace("a", "a\u00ad\u2060")
        for line in plain
    ]
    options = TranslateOptions(beam_size=1, max_length=8)

    def differ() -> list[bool]:
        translator, about = load_translator(run.path, options)
        export(translator, tmp_path / "model", about)
        made = [
            m.Translate([*plain, *untidy])
            for m in (translator, SavedTranslator(tmp_path / "model"))
        ]
        scorer = Scorer(run.path)
        scores = [s.log_prob for s in scorer.Score([*plain, *untidy], [*untidy, *plain])]
        (want, got) = ([t[0] for t in m.translations] for m in made)
        assert want == got
        of_plain = [s.log_prob for s in scorer.Score(plain, plain)]
        return [want[:3] != want[3:], not np.allclose(scores, of_plain * 2, atol=1e-4)]

    assert differ() == [True, True]
    _tidied(run, 2)
    assert differ() == [False, False]
    _tidied(run, 3)
    with pytest.raises(RunDirError, match="tidied by version 3; 2 is the latest here"):
        load_translator(run.path, options)


def test_a_run_knows_how_its_data_were_tidied_and_data_keep_their_split(tmp_path, caplog):
    (tmp_path / "texts").mkdir()
    lines = [f"Satz {w}\t{w} लड़का {w}" for w in toy.sentences(300)]
    (tmp_path / "texts" / "de.tsv").write_text("\n".join(lines))
    options = PrepareOptions(
        VocabOptions(284, 284), Fields(target_lang="hi"), Rules(check_script=False), 0.1
    )
    data = tmp_path / "data"

    def about() -> dict:
        return json.loads((data / "prepared.json").read_text())

    prepare([tmp_path / "texts"], data, options)
    assert (about()["tidied"], about()["keys"]) == (2, 2)
    sizes = {
        "source_vocab_size": 284,
        "target_vocab_size": 284,
        "cache_dir": str(tmp_path / "cache"),
    }
    found = [
        tidied_of(
            MtInput.Params().Set(data_dir=str(at), **sizes).Instantiate().Prepare().Artifacts()
        )
        for at in (data, tmp_path / "texts")
    ]
    assert found == [2, 0]
    # As an earlier version made it.
    (data / "prepared.json").write_text(json.dumps({"format": 2, "languages": {}}))
    prepare([tmp_path / "texts"], data, options)
    assert about()["keys"] == 1 and "whose split is kept" in caplog.text
