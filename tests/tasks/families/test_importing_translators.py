"""Translators that the `transformers` library wrote give its logits and translations once they are imported.

benchmarks/peers/record_translators.py made the files in testdata/.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from local_server import running
from published import CODES, LETTERS, copied

from lingvo_moe import trainer
from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.engine.loop.summaries import read_metrics
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.families.importing import import_checkpoint, open_published
from lingvo_moe.tasks.mt.decode_step import Decoder
from lingvo_moe.tasks.mt.decoding.fast_decoder import FastDecoder
from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights
from lingvo_moe.tasks.text.quality.forced_decoding import Scorer
from lingvo_moe.tasks.text.runs.artifacts import language_codes_of
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from lingvo_moe.tasks.text.vocabulary.language_codes import read_language_codes
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary
from tools import export, translate

TESTDATA = Path(__file__).parent / "testdata"
NAMES = ["m2m100", "nllb_moe", "nllb_moe_before"]


@pytest.fixture(scope="module", params=NAMES)
def imported(request, tmp_path_factory):
    """The run of an imported checkpoint, and the expected arrays."""
    directory = tmp_path_factory.mktemp("runs")
    published = open_published(copied(request.param, directory / request.param))
    left_out = import_checkpoint(published, directory / "run", lambda line: None)
    if request.param == "m2m100":
        assert len(left_out) == 5  # three copies of the table, and the sinusoids of both stacks
    return directory / "run", np.load(TESTDATA / request.param / "expected.npz")


@pytest.fixture(scope="module")
def loaded(imported):
    """The model, its weights, and the expected arrays."""
    run = TextRunDir(imported[0])
    model = run.Task()
    return model, load_theta(run, model)[0].Transform(tf.constant), imported[1]


def _text(ids):
    """The text of source or target ids, without marks and codes."""
    return "".join(LETTERS[i - 4] for i in ids if 4 <= i < 30).replace("\u2581", " ").strip()


def _directions(expected):
    """The direction of each line."""
    codes = zip(expected["source"][:, 0], expected["firsts"], strict=True)
    return [f"{CODES[source - 30]}-{CODES[first - 30]}" for source, first in codes]


def _row(ids):
    ids = tf.constant(ids, tf.int32)
    at = tf.tile(tf.range(ids.shape[1])[tf.newaxis], [ids.shape[0], 1])
    return NestedMap(ids=ids, labels=ids, segment_ids=tf.ones_like(ids), segment_pos=at)


def _logits(model, theta, expected):
    batch = NestedMap(src=_row(expected["source"]), tgt=_row(expected["target"]))
    with use_mesh(single_device()):
        carry, _, _ = model.Forward().Run(theta, Context(batch))
        y = model.decoder.Normalized(theta.decoder, carry.x)
        return model.softmax.FProp(theta[model.softmax_table], y).numpy()


def test_logits(loaded):
    model, theta, expected = loaded
    logits = _logits(model, theta, expected)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=1e-4)


def test_all_experts_run(loaded):
    """transformers 5.0 to 5.24 run the first two: with the others' weights zero, their outputs stay as they are."""
    model, theta, expected = loaded
    if not model.p.num_experts:
        pytest.skip("a dense model")
    first_two = tf.constant([1.0, 1.0, 0.0, 0.0, 0.0])[:, tf.newaxis, tf.newaxis]
    changed = [
        x * first_two if ".experts.w" in n and len(x.shape) == 4 else x
        for n, x in theta.FlattenItems()
    ]
    logits = _logits(model, theta.Pack(changed), expected)
    assert np.abs(logits - expected["logits"]).max() > 0.1


@pytest.mark.parametrize(("beam_size", "fast"), [(1, False), (5, True)])
def test_tokens_of_translations(beam_size, fast, loaded):
    model, theta, expected = loaded
    options = SearchOptions(beam_size, 1, 0.0, bos_id=2, eos_id=2, pad_id=1, unk_id=3)
    source = NestedMap(_row(expected["source"]), first=tf.constant(expected["firsts"], tf.int32))
    limits = tf.fill([len(expected["source"])], 12)
    weights = PackedWeights(model, theta, "float32")

    @tf.function(autograph=False)
    def search():
        if fast:
            return FastDecoder(weights, options, 12, 41).Find(source, limits)
        with use_mesh(single_device()):
            return Decoder(model, options, 12).Search(theta, source, limits)

    found = search().ids_BKT[:, 0].numpy()
    wanted = np.where(expected[f"beam{beam_size}"] < 0, 1, expected[f"beam{beam_size}"])
    np.testing.assert_array_equal(found, wanted[:, : found.shape[1]])


def test_the_command_takes_a_source_and_a_target_language(imported, tmp_path, capsys):
    run, expected = imported
    if TextRunDir(run).Params().task.num_experts:
        pytest.skip("one model is enough")
    (tmp_path / "lines.txt").write_text(_text(expected["source"][0]) + "\n\n")
    model = [f"--logdir={run}", "--beam_size=5", "--length_alpha=0", "--max_length=12"]
    files = [f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / 'out.txt'}"]
    of_lines = [f"--language={_directions(expected)[0]}"]
    assert translate.main([*model, *files, *of_lines]) == 0
    assert (tmp_path / "out.txt").read_text() == f"{_text(expected['beam5'][0])}\n\n"
    for language in ("aaa_Latn-xyz_Latn", f"{CODES[0]}-{CODES[1]}-{CODES[2]}"):
        assert translate.main([*model, *files, f"--language={language}"]) == 1
        assert "unknown language" in capsys.readouterr().err


@pytest.mark.parametrize("is_exported", [True, False])
def test_a_model_is_served_with_two_languages_for_each_line(imported, tmp_path, is_exported):
    run, expected = imported
    if TextRunDir(run).Params().task.num_experts:
        pytest.skip("one model is enough")
    if is_exported:
        flags = [f"--logdir={run}", f"--output={tmp_path / 'model'}", "--beam_size=5", "--top_k=1"]
        assert export.main([*flags, "--length_alpha=0", "--max_length=12"]) == 0
        model: Any = SavedTranslator(tmp_path / "model")
    else:  # its lines join a batch that runs
        options = TranslateOptions(beam_size=5, length_alpha=0.0, max_length=12)
        model, _ = load_translator(run, options)
    assert model.joins is not is_exported
    directions = _directions(expected)
    lines, wanted = (list(map(_text, expected[name])) for name in ("source", "beam5"))
    lines, wanted, directions = [*lines, " "], [*wanted, ""], [*directions, directions[0]]
    with running(model) as server:
        columns = {"text": lines, "language": directions}
        reply = server.Ask("POST", "/v1/models/translator:predict", {"inputs": columns})
        assert reply.content["outputs"]["translations"] == [[text] for text in wanted]
        assert server.Translate(lines[0], language=directions[0]) == wanted[:1]
        reply = server.Ask("POST", "/translate", {"text": "a", "language": "aaa_Latn-xyz_Latn"})
        assert reply.status == 400
        assert 'no language "xyz_Latn" (did you mean' in reply.content["error"]
        about = server.Ask("GET", "/health").content["model"]
        assert about["languages"] == about["target_languages"] == CODES


def test_pairs_are_scored_and_trained_on_from_one_language_to_another(imported, tmp_path, capsys):
    """The losses are those of `transformers`; codes are ids of both sides, that of the target is predicted first."""
    run, expected = imported
    if TextRunDir(run).Params().task.num_experts:
        pytest.skip("one model is enough")
    sources, targets = ([_text(row) for row in expected[side]] for side in ("source", "target"))
    scores = Scorer(run).Score(sources, targets, "aaa_Latn-bbb_Latn")
    for score, losses in zip(scores, expected["losses"], strict=True):
        np.testing.assert_allclose(score.token_log_probs, -losses[1:], atol=1e-4)
    with pytest.raises(DataError, match=r"'aaa_Latn': this model needs SOURCE-TARGET, e.g. aaa"):
        Scorer(run).Score(["a"], ["b"], "aaa_Latn")
    texts, tuned = tmp_path / "texts", tmp_path / "tuned"
    texts.mkdir()
    lines = "".join(f"{a}\t{b}\n" for a, b in zip(sources, targets, strict=True))
    (texts / "aaa_Latn-bbb_Latn.tsv").write_text(lines)
    override = "input.batch_size=8;input.source_length=16;input.target_length=16;input.pack=False"
    override += ";task.dropout=0;task.label_smoothing=0;train.summary_interval_steps=1"
    override += ";task.optimizer.learning_rate=constant;task.optimizer.learning_rate.value=0.01"
    flags = [f"--init_from={run}", f"--data_dir={texts}", f"--logdir={tuned}", "--max_steps=4"]
    assert trainer.main([*flags, "--num_devices=1", f"--model_params_override={override}"]) == 0
    losses = [row["nll"] for row in read_metrics(str(tuned / "train"))]
    assert losses[0] == pytest.approx(expected["losses"].mean(), abs=1e-4)
    assert losses[3] < losses[2] < losses[1] < losses[0]
    assert language_codes_of(TextRunDir(tuned).artifacts).ids.keys() == {*CODES}
    (texts / "aaa_Latn-bbb_Latn.tsv").rename(texts / "aaa_Latn-xyz_Latn.tsv")
    assert trainer.main([*flags[:2], f"--logdir={tmp_path / 'x'}"]) == 2
    assert "'aaa_Latn-xyz_Latn': this model has no language 'xyz_Latn'" in capsys.readouterr().err


def test_a_tokenizer_json_alone_gives_the_same_ids(tmp_path):
    recorded = TESTDATA / "translators"
    shutil.copy(recorded / "tokenizer.json", tmp_path)
    model, codes = read_language_codes(tmp_path, 2)
    expected = np.load(recorded / "expected.npz")
    lines = (recorded / "lines.txt").read_text().splitlines()
    texts = zip(expected["nllb_codes"].tolist(), Vocabulary(model).EncodeBatch(lines), strict=True)
    ids = [[codes.ids[code], *ids, 2] for code, ids in texts]
    assert list(itertools.chain(*ids)) == expected["nllb"].tolist()
    content = json.loads((recorded / "tokenizer.json").read_text())
    content["model"]["merges"].pop(7)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        DataError, match=r"made of a SentencePiece model \(merges\); put sentencepi"
    ):
        read_language_codes(tmp_path, 2)
    with pytest.raises(DataError, match=r"No such file .*; expected it, or tokenizer.json$"):
        read_language_codes(tmp_path / "x", 2)


@pytest.mark.parametrize("name", ["nllb", "m2m100"])
def test_ids_of_tokenizers(name, tmp_path):
    """Pieces, the places of codes, and marks are those of the library's tokenizers, in 40 languages."""
    recorded = TESTDATA / "translators"
    shutil.copy(recorded / "sentencepiece.bpe.model", tmp_path)
    shutil.copy(recorded / f"{name}.json", tmp_path / "special_tokens_map.json")
    if name == "m2m100":
        shutil.copy(recorded / "vocab.json", tmp_path)
    model, codes = read_language_codes(tmp_path, 2)
    vocabulary, expected = Vocabulary(model), np.load(recorded / "expected.npz")
    lines = (recorded / "lines.txt").read_text().splitlines()
    of_lines = expected[f"{name}_codes"].tolist()
    found = [
        [codes.ids[code], *ids, vocabulary.eos_id]
        for code, ids in zip(of_lines, vocabulary.EncodeBatch(lines), strict=True)
    ]
    assert list(itertools.chain(*found)) == expected[name].tolist()
    assert len(codes.ids) == {"nllb": 202, "m2m100": 100}[name]
    assert (vocabulary.bos_id, vocabulary.pad_id, vocabulary.unk_id) == (0, 1, 3)
    assert not codes.is_last
    settings = json.loads((tmp_path / "special_tokens_map.json").read_text())
    settings.pop("added_tokens_decoder", None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(settings))
    assert min(read_language_codes(tmp_path, 2)[1].ids.values()) == 901  # 900 pieces and padding
    (tmp_path / "tokenizer_config.json").write_text('{"legacy_behaviour": true}')
    assert read_language_codes(tmp_path, 2)[1].is_last
    assert vocabulary.Decode(found[0]) == lines[0]


@pytest.mark.parametrize(("codes", "start", "message"), [
    (5, 2, "must be lists: 5"),
    (["eng_Latn"], "x", "begins with 'x', which is no id"),
    (["eng_Latn"], None, "begins with None, which is no id"),
    (["eng_Latn"], 902, "begins with 902, which is no id"),
])  # fmt: skip
def test_codes_and_starts_of_another_type_are_refused(codes, start, message, tmp_path):
    shutil.copy(TESTDATA / "translators/sentencepiece.bpe.model", tmp_path)
    settings = json.dumps({"additional_special_tokens": codes})
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match=message):
        read_language_codes(tmp_path, start)
