"""Translation and language models: a NumPy decoder's loss, packed rows, padding, layers unrolled, devices, FLOPs.
tests/core/layers/test_transformer.py has the stacks, and test_transformer_parts.py the parts of layers and the steps.

Letters: B row, T time, S key, V vocabulary, L layer, M model, H hidden, N head, K key dimension, E expert.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, with_gradients
from refusals import refuses

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.layers.latent_attention import LatentAttention
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.core.task.inspect import count_parameters
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.text.runs.artifacts import VOCAB_FILES

V_SOURCE, V, M, H, N, K, E, L = 11, 12, 8, 16, 2, 4, 4, 3
SIZES = {"model_dim": M, "hidden_dim": H, "num_heads": N, "key_dim": K, "attention_dropout": 0.1}
STEP = make_seed(5, 7)
# Several texts in a row, one, and one with much padding.
SEGMENTS = ((1, 1, 1, 2, 2, 0), (1, 1, 1, 1, 1, 1), (1, 1, 0, 0, 0, 0), (1, 1, 2, 2, 3, 3))
TARGETS = ((1, 1, 2, 2, 2), (1, 1, 1, 1, 0), (1, 0, 0, 0, 0), (1, 2, 2, 2, 3))
BOTH = pytest.mark.parametrize("kind", ["lm", "mt"])


def _model(kind, **kwargs):
    """A language model of L layers; or one of translation, of two layers a side, half of them with experts."""
    if kind == "lm":
        p = LmModel.Params().Set(name="lm", vocab_size=V, num_layers=L)
    else:
        p = MtModel.Params().Set(name="mt", source_vocab_size=V_SOURCE, target_vocab_size=V)
        p.Set(num_encoder_layers=2, num_decoder_layers=2, num_experts=E, num_groups=4)
        p.Set(repeat=False, activation_split={}, weight_split={})
    return p.Set(**SIZES).Set(**kwargs).Instantiate()


@pytest.fixture(autouse=True)
def _one_device():
    with use_mesh(single_device()):
        yield


@functools.cache
def _made(kind):
    """The model and its initial weights."""
    model = _model(kind)
    return model, model.InitTheta(make_seed(1, 0)).Transform(lambda w: w.numpy())


def _row(vocab, seed, segments):
    """Ids of the given segments, int32 [B,T], and positions that restart with each segment."""
    segments = np.array(segments, np.int32)
    ids = np.random.RandomState(seed).randint(4, vocab, segments.shape).astype(np.int32)
    pos = np.zeros_like(segments)
    for t in range(1, segments.shape[1]):
        pos[:, t] = np.where(segments[:, t] == segments[:, t - 1], pos[:, t - 1] + 1, 0)
    real = segments > 0
    return NestedMap(ids=ids * real, segment_ids=segments, segment_pos=pos * real)


def _batch(kind, segments=SEGMENTS, targets=TARGETS):
    """Packed rows; those of a language model have `segments`, as the sources of translation."""
    row = _row(V, 2, segments if kind == "lm" else targets)
    row.labels = _row(V, 3, row.segment_ids).ids
    return row if kind == "lm" else NestedMap(src=_row(V_SOURCE, 1, segments), tgt=row)


def _rows(batch):
    """The rows of a batch, that of the labels last."""
    return [batch] if "ids" in batch else [batch.src, batch.tgt]


def _constants(*trees):
    return [tree.Transform(tf.constant) for tree in trees]


def _loss_and_grads(model, theta, batch):
    """The results and gradients of a training step, with dropout."""
    found = with_gradients(lambda theta: model.FProp(theta, batch, seed=STEP))(theta)
    return NestedMap(found, grads=theta.Pack(found.grads))


@functools.cache
def _step(kind):
    """A function batch -> results and gradients of a training step, traced once for all batches."""
    model, theta = _made(kind)
    run = tf.function(lambda *args: _loss_and_grads(model, *args), autograph=False)
    return lambda batch: run(*_constants(theta, batch)).Transform(lambda x: x.numpy())


def _norm(x, weights):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * weights.scale + weights.bias


def _softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def _numpy_branch(x, part, place, norm, output_norm):
    """x plus a part of a layer, with its normalizations."""
    if place == "after":
        return _norm(x + part(x), norm)
    if place == "output":
        return x + _norm(part(x), norm)
    y = part(_norm(x, norm))
    return x + (_norm(y, output_norm) if place == "both" else y)


def _numpy_logits(theta, batch, place="before", scale=M**0.5, softmax_scale=1.0, offset=0):
    """The model in inference, written out."""
    at = batch.segment_pos[..., None] + offset
    waves = 10000.0 ** (-np.arange(M // 2) / (M // 2 - 1)) * at
    x = theta.embedding.table[batch.ids] * scale
    x = x + np.concatenate([np.sin(waves), np.cos(waves)], -1)
    seg, pos = batch.segment_ids, batch.segment_pos
    sees = (seg[:, :, None] == seg[:, None, :]) & (pos[:, :, None] >= pos[:, None, :])
    for i in range(L):
        w = theta.decoder.blocks.body.layers[0].Transform(lambda stacked, i=i: stacked[i])

        def attend(y, w=w.self_atten):
            q, k, v = (
                np.einsum("BTM,MNK->BNTK", y, w[name])
                + w.get(f"{name}_bias", np.zeros((N, K)))[:, None]
                for name in "qkv"
            )
            scores = np.einsum("BNTK,BNSK->BNTS", q, k) / np.sqrt(K)
            probs = _softmax(np.where(sees[:, None], scores, -1e9))
            return np.einsum("BNTS,BNSK,NKM->BTM", probs, v, w.o) + w.get("o_bias", 0)

        def feed_forward(y, w=w.ffn):
            hidden = np.maximum(y @ w.wi + w.get("wi_bias", 0), 0)
            return hidden @ w.wo + w.get("wo_bias", 0)

        for name, part in (("self", attend), ("ffn", feed_forward)):
            x = _numpy_branch(x, part, place, w[f"{name}_norm"], w.get(f"{name}_output_norm"))
    x = x if place == "after" else _norm(x, theta.decoder.final_norm)
    return softmax_scale * x @ theta.embedding.table.T


def _assert_made_of_parts(logits, row, loss, metrics, aux=0.0):
    """loss = label-smoothed cross-entropy + aux; metrics are means over real tokens."""
    log_probs = np.log(_softmax(logits))
    nll = -np.take_along_axis(log_probs, row.labels[..., None], -1)[..., 0]
    real = row.segment_ids > 0
    assert metrics.tokens == real.sum()
    np.testing.assert_allclose(metrics.nll, nll[real].mean(), rtol=1e-5)
    smooth = 0.9 * nll - 0.1 * log_probs.mean(-1)
    np.testing.assert_allclose(loss, smooth[real].mean() + aux, rtol=1e-5)
    assert metrics.loss == loss
    right = logits.argmax(-1) == row.labels
    np.testing.assert_allclose(metrics.accuracy, right[real].mean(), rtol=1e-6)


def test_the_loss_is_that_of_a_decoder_in_numpy():
    model, theta = _made("lm")
    batch = _batch("lm")
    loss, metrics = run_single(model.FProp, [theta, batch])
    _assert_made_of_parts(_numpy_logits(theta, batch), batch, loss, metrics)


def test_the_loss_of_experts_is_added():
    model, theta = _made("mt")
    batch, seen, shard = _batch("mt"), [], model.softmax.Shard
    model.softmax.Shard = lambda x, letters: seen.append(x) or shard(x, letters)
    try:
        loss, metrics = model.FProp(*_constants(theta, batch), seed=STEP)
    finally:
        del model.softmax.Shard
    assert metrics.aux_loss > 0
    aux = model.p.aux_loss_weight * metrics.aux_loss
    _assert_made_of_parts(seen[0].numpy(), batch.tgt, loss, metrics, aux)
    moe = metrics.moe
    assert moe.encoder.expert_load.shape == (1, E) and moe.decoder.dispatch_2.shape == (1,)


@BOTH
def test_packed_rows_equal_separate_rows(kind):
    """Each text has the same log-probabilities in inference, token by token."""
    model, theta = _made(kind)
    packed = _batch(kind, SEGMENTS[:1], TARGETS[:1])
    together, _ = model.LogProbs(*_constants(theta, packed))
    for number in (1, 2):
        single = packed.Transform(np.copy)
        for row in _rows(single):
            mine = row.segment_ids[0] == number
            row.update(row.Transform(lambda x, mine=mine: x[:, mine]))
            row.segment_ids = np.ones_like(row.segment_ids)
        mine = _rows(packed)[-1].segment_ids[0] == number
        alone, _ = model.LogProbs(*_constants(theta, single))
        np.testing.assert_allclose(together.numpy()[:, mine], alone, rtol=1e-4, atol=1e-5)


@BOTH
def test_what_stands_in_the_padding_moves_nothing(kind):
    quiet, loud = _step(kind)(_batch(kind)), _batch(kind)
    for row in _rows(loud):
        vocab = V if "labels" in row else V_SOURCE
        noise = np.random.RandomState(9).randint(0, vocab, row.ids.shape)
        for name in row.keys() - {"segment_ids"}:
            row[name] = np.where(row.segment_ids > 0, row[name], noise).astype(np.int32)
    assert_same(_step(kind)(loud), quiet, floor=1.0)
    assert all(np.abs(gradient).max() > 0 for gradient in quiet.grads.Flatten())


@BOTH
def test_a_batch_of_padding_alone_is_finite(kind):
    found = _step(kind)(_batch(kind).Transform(np.zeros_like))
    assert all(np.isfinite(value).all() for value in found.Flatten())
    assert found.rest.tokens == 0


@pytest.mark.parametrize(("params", "numpy_options"), [
    ({"norm_place": "after"}, {"place": "after"}),
    ({"norm_place": "both"}, {"place": "both"}),
    ({"norm_place": "output"}, {"place": "output"}),
    ({"embedding_scale": 1.5, "softmax_scale": 0.3}, {"scale": 1.5, "softmax_scale": 0.3}),
    ({"position.offset": 2}, {"offset": 2}),
    ({"use_bias": True, "attention": ExtendedAttention.Params()}, {}),
], ids=["after", "both", "output", "scales", "offset", "biases"])  # fmt: skip
def test_a_parameter_gives_the_log_probabilities_of_numpy(params, numpy_options):
    """Weights that start as ones or zeros are others here."""
    model, rng, batch = _model("lm", **params), np.random.RandomState(3), _batch("lm")
    theta = model.InitTheta(make_seed(1, 0))
    theta = theta.Transform(lambda w: w.numpy() + 0.3 * rng.randn(*w.shape).astype("float32"))
    got, _ = model.LogProbs(*_constants(theta, batch))
    log_probs = np.log(_softmax(_numpy_logits(theta, batch, **numpy_options)))
    want = np.take_along_axis(log_probs, batch.labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(got, np.where(batch.segment_ids > 0, want, 0), rtol=2e-4, atol=1e-5)


@refuses(
    ValueError,
    ({"norm_place": "behind"}, "norm_place='behind': must be one of before, after, both, output"),
    ({"embedding_scale": 0.0}, "embedding_scale=0.0: must be a positive number"),
    ({"softmax_scale": -1.0}, "softmax_scale=-1.0: must be a positive number"),
    ({"position.offset": -1}, "offset=-1: must be an integer"),
    (
        {"use_bias": True, "attention": LatentAttention.Params()},
        "task.use_bias=True: LatentAttention has no biases; choose task.attention=multi_head",
    ),
)
def test_a_value_without_meaning_is_refused(params):
    _model("lm", **params)


def test_the_scan_equals_the_layers_unrolled():
    theta, batch = _made("lm")[1], _batch("lm")
    got = _loss_and_grads(_model("lm", repeat=False), *_constants(theta, batch))
    assert_same(got, _step("lm")(batch), floor=0.0)


def test_sharded_over_four_devices_values_and_gradients_are_those_of_one():
    inside = {"N": "model", "H": "model", "V": "model"}
    sharded = _model("lm", weight_split=inside, activation_split={"B": "data", **inside})
    theta, batch = _made("lm")[1], _batch("lm")
    rows = batch.Transform(lambda ids: TensorSpec(ids.shape, "int32", ("data", None)))
    splits = [sharded.VariableSpecs(), rows]
    fn, mesh = lambda *args: _loss_and_grads(sharded, *args), Mesh.parse("data:2,model:2")
    got, collectives = run_sharded(fn, [theta, batch], mesh, splits)
    assert_same(got, _step("lm")(batch), tol=2e-5, floor=0.0)
    assert collectives["all-reduce"] > 0


def test_a_softmax_of_its_own_has_a_table_and_its_gradients():
    theta, batch, model = _made("lm")[1], _batch("lm"), _model("lm", tied_softmax=False)
    trained = _step("lm")(batch)
    specs = model.VariableSpecs()
    assert count_parameters(specs.Flatten()) == V * M + sum(w.size for w in theta.Flatten())
    other = NestedMap(theta, softmax=NestedMap(table=theta.embedding.table))
    own = _loss_and_grads(model, *_constants(other, batch))
    np.testing.assert_allclose(own.loss, trained.loss, rtol=1e-6)
    both = own.grads.embedding.table + own.grads.softmax.table
    np.testing.assert_allclose(both, trained.grads.embedding.table, rtol=1e-4, atol=1e-6)


def test_flops_are_those_of_the_matrix_products():
    model = _model("lm")
    flops = model.Costs().FlopsByPart(NestedMap(ids=np.zeros((4, 6))))
    tokens, heads = 4 * 6, N * K
    assert flops == {
        "decoder.self_atten": L * tokens * (2 * 4 * M * heads + 2 * 2 * 6 * heads),
        "decoder.ffn": L * tokens * 2 * 2 * M * H,
        "softmax": tokens * 2 * M * V,
    }


def test_an_id_without_an_embedding_is_refused():
    params = registry.GetParams("lm.Tiny", "input.target_vocab_size=301")
    message = r"^input.target_vocab_size=301 is more than task.vocab_size=300"
    with pytest.raises(TaskError, match=message):
        LmModel.CheckInput(params.task, params.input)


def test_a_shared_table_is_the_same_one_for_source_and_target():
    """Its gradient is the sum of those of two equal tables."""
    sizes = {"source_vocab_size": V, "num_experts": 0, "num_encoder_layers": 1}
    sizes["num_decoder_layers"] = 1
    apart, shared = _model("mt", **sizes), _model("mt", shared_embedding=True, **sizes)
    assert apart.Table(apart.STACKS[0]) == "source_embedding"
    theta, batch = shared.InitTheta(make_seed(1, 0)), _batch("mt").Transform(tf.constant)
    tables = dict.fromkeys(("source_embedding", "target_embedding"), theta.embedding)
    others = {name: theta[name] for name in ("encoder", "decoder", "softmax") if name in theta}
    copies = NestedMap(tables, **others).Transform(tf.identity)
    got, want = _loss_and_grads(shared, theta, batch), _loss_and_grads(apart, copies, batch)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6)
    total = want.grads.source_embedding.table + want.grads.target_embedding.table
    np.testing.assert_allclose(got.grads.embedding.table, total, rtol=1e-4, atol=1e-6)
    with pytest.raises(ParamError, match="shared_embedding=True: needs vocabularies of one size"):
        _model("mt", shared_embedding=True)


class _OfTwoVocabularies(MtInput):
    def Artifacts(self):
        vocabs = {"source": b"one", "target": b"another"}
        return RunArtifacts(files={VOCAB_FILES[side]: model for side, model in vocabs.items()})


def test_a_shared_table_is_of_one_vocabulary():
    model = _model("mt", source_vocab_size=V, shared_embedding=True)
    with pytest.raises(TaskError, match="vocabularies of source and target differ"):
        model.CheckData(_OfTwoVocabularies(MtInput.Params()))
