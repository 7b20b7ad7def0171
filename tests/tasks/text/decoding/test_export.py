"""A run's checkpoint becomes strings: the real model decodes, is saved, and is loaded with TensorFlow alone."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import toy_translation as toy
from damage import full_disk
from numpy.testing import assert_array_equal
from processes import run_python
from tensorflow.python.tools import saved_model_cli

from lingvo_moe.core.engine.checkpoints.checkpoints import CheckpointError
from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
from lingvo_moe.core.files.manifest import verify_manifest
from lingvo_moe.core.runs.directories import OutputError
from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator
from lingvo_moe.tasks.text.decoding.export import Exportable, export
from lingvo_moe.tasks.text.decoding.saved_functions import ABOUT, MANIFEST
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

pytestmark = pytest.mark.slow

# One bucket, to compile once.
OPTIONS = TranslateOptions(beam_size=3, top_k=2, max_source_length=8, max_length=14, rows=4)
_BARE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "lingvo_moe", "orbax", "sentencepiece"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Blocked())
import json
import tensorflow as tf
import tensorflow_text

signatures = tf.saved_model.load(sys.argv[1]).signatures
assert signatures["predict"].structured_outputs == signatures["serving_default"].structured_outputs
out = signatures["serving_default"](text=tf.constant(json.loads(sys.stdin.read())))
texts = [[t.decode() for t in row] for row in out["translations"].numpy()]
print(json.dumps([texts, out["scores"].numpy().tolist(), out["truncated"].numpy().tolist()]))
"""


@pytest.fixture(scope="module")
def vocab() -> bytes:
    return toy.train_vocab(toy.sentences(200), bytes_too=False)


@pytest.fixture(scope="module")
def logdir(tmp_path_factory, vocab):
    path = tmp_path_factory.mktemp("run")
    target = toy.train_vocab([line.upper() for line in toy.sentences(200)], bytes_too=False)
    toy.save_run(path, vocab, target_vocab=target, more=toy.SMALL)
    return path


@pytest.fixture(scope="module")
def translator(logdir):
    found, about = load_translator(logdir, OPTIONS)
    assert (about["model"], about["step"]) == ("mt.M4Tiny", 7)
    assert about["trained_languages"] == (TextRunDir(logdir).languages or [])
    return found


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory, translator):
    path = tmp_path_factory.mktemp("saved") / "model"
    export(translator, path, {"model": "mt.M4Tiny"})
    return path


LINES = [*toy.sentences(40, seed=3, longest=5), "", "  ", "\u2028", "red\0", "日本"]


def test_saved_model_in_bare_tensorflow(translator, saved_model):
    elsewhere = {"cwd": saved_model, "env": {"PYTHONPATH": None}}
    done = run_python("-c", _BARE, str(saved_model), input=json.dumps(LINES), **elsewhere)
    assert done.returncode == 0, done.stderr[-2000:]
    texts, scores, truncated = json.loads(done.stdout)
    want = translator.Translate(LINES)
    assert texts == want.translations
    assert_array_equal(np.float32(scores), want.scores)
    assert_array_equal(truncated, want.truncated)


def test_saved_translator(translator, saved_model):
    """Its two vocabularies stay two: TensorFlow merges tokenizers of equal names when it loads them."""
    want, got = translator.Translate(LINES), SavedTranslator(str(saved_model)).Translate(LINES)
    assert got.translations == want.translations
    assert_array_equal(got.scores, want.scores)
    assert any(text.isupper() for row in want.translations for text in row)
    about = json.loads((saved_model / ABOUT["translate"]).read_text())
    assert (about["model"], about["options"]["beam_size"]) == ("mt.M4Tiny", 3)


def test_signatures_are_what_tensorflow_serving_calls(saved_model, capsys):
    """`saved_model_cli show` prints names, types, shapes, and the method that predict requests look for."""
    saved_model_cli._show_inputs_outputs(str(saved_model), "serve", "predict")
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "inputs['text'] tensor_info: dtype: DT_STRING shape: (-1)",
        "outputs['scores'] tensor_info: dtype: DT_FLOAT shape: (-1, 2)",
        "outputs['translations'] tensor_info: dtype: DT_STRING shape: (-1, 2)",
        "outputs['truncated'] tensor_info: dtype: DT_BOOL shape: (-1)",
        "Method name is: tensorflow/serving/predict",
    ):
        assert text in shown, shown
    assert shown.count("inputs[") == 1
    assert shown.count("outputs[") == 3


def test_checkpoints_that_do_not_fit(tmp_path, vocab):
    toy.save_run(tmp_path, vocab)
    with pytest.raises(CheckpointError, match=r"no such checkpoint; there are \[7\]"):
        load_translator(tmp_path, chosen=Chosen(8))
    TextRunDir(tmp_path).Write(
        "mt.M4Tiny", "task.model_dim=32", text_artifacts({"source": vocab, "target": vocab})
    )
    with pytest.raises(CheckpointError, match=r"not of this run's model: .* in the model"):
        load_translator(tmp_path)
    for file in (tmp_path / "checkpoints").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(CheckpointError, match="damaged"):
        load_translator(tmp_path)


class _Plain(Exportable):
    """The attributes of a Translator that export needs, without a model."""

    NAME = "translate"

    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(tf.zeros([4000]))
        self.options = SimpleNamespace(beam_size=1)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")])
    def translate(self, text):
        return {"translations": text, "scores": self.weights[:1]}


def test_export_replaces_a_saved_model_and_nothing_else(tmp_path):
    other, model = tmp_path / "notes", tmp_path / "model"
    other.mkdir()
    (other / "file").write_text("mine")
    with pytest.raises(OutputError, match=r"holds .*, which is no part of an exported model"):
        export(_Plain(), other)
    export(_Plain(), model)
    before = (model / "fingerprint.pb").stat().st_mtime_ns
    export(_Plain(), model)
    assert (model / "fingerprint.pb").stat().st_mtime_ns > before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "notes"]  # nothing left over


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    export(_Plain(), tmp_path / "model")
    verify_manifest(tmp_path / "model", MANIFEST)
    message = f"File too large: '{tmp_path / 'other'}'"
    with full_disk(9000), pytest.raises(OSError, match=re.escape(message)):
        export(_Plain(), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
