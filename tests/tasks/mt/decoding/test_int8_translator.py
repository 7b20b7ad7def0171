"""A translator with 8-bit weights: its graph, exported, and line by line."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
import toy_translation as toy
from rows import assert_rows_equal

from lingvo_moe.core import kernels
from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator
from lingvo_moe.tasks.text.decoding.export import export
from lingvo_moe.tasks.text.decoding.saved_functions import ABOUT
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

OPTIONS = TranslateOptions(beam_size=3, top_k=2, max_source_length=8, max_length=10)
INT8 = dataclasses.replace(OPTIONS, weights="int8")
LINES = [*toy.sentences(12, seed=3, longest=5), ""]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    toy.save_run(path, toy.train_vocab(toy.sentences(200), bytes_too=False))
    return path


@pytest.fixture(scope="module")
def translator(logdir):
    return load_translator(logdir, INT8)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory, translator):
    path = tmp_path_factory.mktemp("saved") / "model"
    export(translator[0], path, translator[1])
    return path


def _nodes(translator):
    """The nodes of the translating graph and its functions."""
    graph = translator.translate.get_concrete_function().graph.as_graph_def()
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]


def test_every_product_with_a_weight_is_one_of_8_bits(logdir, translator):
    """Products of attention, experts and softmax have 8 bits; tables, norms and routers stay float32."""
    held = translator[0]._weights
    few = {v.name for v in held.variables if v.dtype == tf.int8}
    kept = ("table", "norm", "scale", "bias", "router")
    names = {v.name for v in held.variables} - few
    assert names and all(any(word in name for word in kept) for name in names)
    products = [node for node in _nodes(translator[0]) if node.op == "_QuantizedMatMul"]
    theta = TextRunDir(logdir).Task().VariableSpecs()
    large = [s.shape for _, s in theta.FlattenItems() if len(s.shape) > 1 and s.shape[-1] > 8]
    assert len(products) == len(few) > len(large) / 2 > 5


def test_no_weight_is_a_constant(translator):
    """TensorFlow's graph optimizer writes constants of 8 bits out as text, at the first call."""
    kinds = {tf.int8.as_datatype_enum, tf.qint8.as_datatype_enum}
    for node in _nodes(translator[0]):
        assert node.op != "Const" or node.attr["dtype"].type not in kinds, node.name


def test_a_line_is_the_same_to_the_bit_in_any_batch_and_in_the_export(translator, saved_model):
    want = translator[0].Translate(LINES)
    assert len({texts[0] for texts in want.translations}) > 5
    assert json.loads((saved_model / ABOUT["translate"]).read_text())["weights"] == "int8"
    saved = SavedTranslator(saved_model)
    for translate in (translator[0].Translate, saved.Translate):
        for first, last in ((0, 1), (5, 6), (3, 10), (0, len(LINES))):
            got = translate(LINES[first:last])
            assert got.translations == want.translations[first:last]
            assert_rows_equal(got.scores, want.scores[first:last])


def test_the_logits_of_a_shortlist_are_of_float32(translator):
    """Its columns of the softmax are packed for each batch, within the graph."""
    held = translator[0]._weights
    x_BTM = np.random.default_rng(0).normal(size=[1, 5, held.model.p.model_dim]).astype("f")
    ids_U = tf.range(3, 30)

    @tf.function(autograph=False)
    def logits(x_BTM, ids_U):
        with use_mesh(single_device()), kernels.using(tensorflow):
            softmax, table = held.model.softmax, held.Theta().target_embedding
            both = [table, softmax.OfTokens(table, ids_U)]
            return table.table, *(softmax.FProp(one, x_BTM) for one in both)

    table_VM, all_BTV, some_BTU = logits(x_BTM, ids_U)
    want_BTU = x_BTM @ table_VM.numpy()[ids_U].T
    np.testing.assert_allclose(some_BTU, want_BTU, rtol=1e-5, atol=1e-5)
    assert 1e-3 < np.abs(tf.gather(all_BTV, ids_U, axis=2) - want_BTU).max() < 0.5


def test_where_they_cannot_be_it_is_told(logdir, translator):
    with pytest.raises(ValueError, match="int4: must be one of float32, int8"):
        dataclasses.replace(OPTIONS, weights="int4")
    with pytest.raises(
        ValueError, match=r"weights=int8 is for the search on one host, .*leave it out"
    ):
        load_translator(logdir, INT8, engine=TfEngine())
    with pytest.raises(ValueError, match="cannot be assigned"):
        translator[0].SetTheta(TextRunDir(logdir).Task().InitTheta(tf.constant([0, 0])))


def test_an_export_tells_where_it_cannot_run(saved_model, monkeypatch):
    monkeypatch.setattr(private, "QUANTIZED_PRODUCT", "_NoSuchMatMul")
    with pytest.raises(ValueError, match=r"no products of 8 bits .*_NoSuchMatMul"):
        SavedTranslator(saved_model)
