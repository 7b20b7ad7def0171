"""The language model: a NumPy decoder's loss, causality, the scan unrolled, sharded and not, and its FLOPs.

Letters: B row, T time, S key, L layer, N head, M model, V vocabulary.
"""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, with_gradients
from refusals import refuses

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.layers.latent_attention import LatentAttention
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.core.task.inspect import count_parameters
from lingvo_moe.tasks.lm.model import LmModel

V, M, H, N, K, L = 12, 8, 16, 2, 4, 3
STEP = make_seed(5, 7)


def _model(**kwargs):
    p = LmModel.Params().Set(
        name="lm",
        vocab_size=V,
        model_dim=M,
        hidden_dim=H,
        num_heads=N,
        key_dim=K,
        num_layers=L,
        attention_dropout=0.1,
    )
    return p.Set(**kwargs).Instantiate()


def _batch(
    segments=((1, 1, 1, 2, 2, 0), (1, 1, 1, 1, 1, 1), (1, 1, 0, 0, 0, 0), (1, 1, 2, 2, 3, 3)),
):
    """Packed rows of random ids [4,6]."""
    segments = np.array(segments, np.int32)
    pos = np.zeros_like(segments)
    for t in range(1, segments.shape[1]):
        pos[:, t] = np.where(segments[:, t] == segments[:, t - 1], pos[:, t - 1] + 1, 0)
    real = segments > 0
    ids, labels = np.random.RandomState(1).randint(3, V, (2, *segments.shape)).astype(np.int32)
    return NestedMap(
        ids=ids * real, labels=labels * real, segment_ids=segments, segment_pos=pos * real
    )


@pytest.fixture(autouse=True)
def _one_device():
    with use_mesh(single_device()):
        yield


@pytest.fixture(scope="module")
def theta():
    with use_mesh(single_device()):
        return _model().InitTheta(make_seed(1, 0)).Transform(lambda w: w.numpy())


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


def test_the_loss_is_that_of_a_decoder_in_numpy(theta):
    batch = _batch()
    loss, metrics = run_single(_model().FProp, [theta, batch])
    logits = _numpy_logits(theta, batch)
    log_probs = np.log(_softmax(logits))
    nll = -np.take_along_axis(log_probs, batch.labels[..., None], -1)[..., 0]
    real = batch.segment_ids > 0
    assert metrics.tokens == real.sum() == 19
    np.testing.assert_allclose(metrics.nll, nll[real].mean(), rtol=1e-5)
    smooth = 0.9 * nll - 0.1 * log_probs.mean(-1)
    np.testing.assert_allclose(loss, smooth[real].mean(), rtol=1e-5)
    assert metrics.loss == loss
    right = logits.argmax(-1) == batch.labels
    np.testing.assert_allclose(metrics.accuracy, right[real].mean(), rtol=1e-6)


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
    model, rng, batch = _model(**params), np.random.RandomState(3), _batch()
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
    _model(**params)


def _constants(*trees):
    return [tree.Transform(tf.constant) for tree in trees]


def _loss_and_grads(model, theta, batch):
    """The results and gradients of a training step, with dropout."""
    found = with_gradients(lambda theta: model.FProp(theta, batch, seed=STEP))(theta)
    return NestedMap(found, grads=theta.Pack(found.grads))


@pytest.fixture(scope="module")
def trained(theta):
    """The loss and gradients of a step of the usual model, with dropout."""
    model = _model()
    return run_single(lambda *a: _loss_and_grads(model, *a), [theta, _batch()], jit_compile=False)


def test_the_scan_equals_the_layers_unrolled(theta, trained):
    got = _loss_and_grads(_model(repeat=False), *_constants(theta, _batch()))
    assert_same(got, trained, floor=0.0)
    assert all(np.abs(x).max() > 0 for x in trained.Flatten())


def test_sharded_over_four_devices_values_and_gradients_are_those_of_one(theta, trained):
    inside = {"N": "model", "H": "model", "V": "model"}
    sharded = _model(weight_split=inside, activation_split={"B": "data", **inside})
    batch = _batch()
    rows = batch.Transform(lambda ids: TensorSpec(ids.shape, "int32", ("data", None)))
    splits = [sharded.VariableSpecs(), rows]
    fn, mesh = lambda *args: _loss_and_grads(sharded, *args), Mesh.parse("data:2,model:2")
    got, collectives = run_sharded(fn, [theta, batch], mesh, splits)
    assert_same(got, trained, tol=2e-5, floor=0.0)
    assert collectives["all-reduce"] > 0


def test_a_softmax_of_its_own_has_a_table_and_its_gradients(theta, trained):
    model = _model(tied_softmax=False)
    specs = model.VariableSpecs()
    assert count_parameters(specs.Flatten()) == V * M + sum(w.size for w in theta.Flatten())
    other = NestedMap(theta, softmax=NestedMap(table=theta.embedding.table))
    own = _loss_and_grads(model, *_constants(other, _batch()))
    np.testing.assert_allclose(own.loss, trained.loss, rtol=1e-6)
    both = own.grads.embedding.table + own.grads.softmax.table
    np.testing.assert_allclose(both, trained.grads.embedding.table, rtol=1e-4, atol=1e-6)


def test_flops_are_those_of_the_matrix_products():
    model = _model()
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
