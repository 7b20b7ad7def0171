"""The translation model: scanned and unrolled, packed and unpacked, padded, step by step, and counted by hand.

Letters: B row, S source time, T target time, V vocabulary, L layer, J hypothesis, M model.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.config import registry
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.task.inspect import count_parameters
from lingvo_moe.tasks.mt.model import MtModel

V_SOURCE, V, M, H, N, K, E, G = 11, 13, 8, 16, 2, 4, 4, 3
STEP = make_seed(5, 7)


def _params(**kwargs):
    p = MtModel.Params().Set(
        name="mt",
        source_vocab_size=V_SOURCE,
        target_vocab_size=V,
        model_dim=M,
        hidden_dim=H,
        num_heads=N,
        key_dim=K,
        num_encoder_layers=4,
        num_decoder_layers=4,
        num_experts=E,
        num_groups=G,
        attention_dropout=0.1,
        activation_split={},
        weight_split={},
    )
    return p.Set(**kwargs)


@pytest.fixture(autouse=True)
def _one_device():
    with use_mesh(single_device()):
        yield


@pytest.fixture(scope="module")
def model():
    return _params().Instantiate()


@pytest.fixture(scope="module")
def theta(model):
    with use_mesh(single_device()):
        return model.InitTheta(make_seed(1, 0))


@pytest.fixture(scope="module")
def trained(model, theta):
    """Returns results and gradients of a training step on the usual batch, as (path, value) pairs."""
    with use_mesh(single_device()):
        return _loss_and_grads(model, theta, _batch(), STEP)


def _side(vocab, seed, segments):
    """Ids of the given segments, int32 [B,T], and positions that restart with each segment."""
    segments = np.array(segments, np.int32)
    ids = np.random.RandomState(seed).randint(4, vocab, segments.shape).astype(np.int32)
    pos = np.zeros_like(segments)
    for row, segment in zip(pos, segments):
        for t in range(1, row.size):
            row[t] = row[t - 1] + 1 if segment[t] == segment[t - 1] else 0
    real = segments > 0
    return NestedMap(ids=ids * real, segment_ids=segments, segment_pos=pos * real)


def _batch(src=None, tgt=None):
    """Three rows: two examples packed, one, and one with much padding."""
    src = _side(V_SOURCE, 1, src or [[1, 1, 1, 2, 2, 0], [1] * 6, [1, 1, 0, 0, 0, 0]])
    tgt = _side(V, 2, tgt or [[1, 1, 2, 2, 2], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]])
    tgt.labels = _side(V, 3, tgt.segment_ids).ids
    return NestedMap(src=src, tgt=tgt)


def _logits(model, theta, batch, seed=None):
    """Returns the logits [B,T,V] inside FProp, and FProp's results."""
    batch, seen, shard = batch.Transform(tf.constant), [], model.softmax.Shard
    model.softmax.Shard = lambda x, letters: seen.append(x) or shard(x, letters)
    try:
        loss, metrics = model.FProp(theta, batch, seed=seed)
    finally:
        del model.softmax.Shard
    return seen[0].numpy(), loss, metrics


@functools.cache
def _program(model, training):
    """A function of (theta, batch), which is traced once for all batches."""

    @tf.function(autograph=False)
    def loss_and_grads(theta, batch):
        leaves = theta.Flatten()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            loss, metrics = model.FProp(theta, batch, seed=STEP if training else None)
        return NestedMap(loss=loss, metrics=metrics, grads=theta.Pack(tape.gradient(loss, leaves)))

    return loss_and_grads


def _loss_and_grads(model, theta, batch, seed):
    found = _program(model, seed is not None)(theta, batch.Transform(tf.constant))
    return found.Transform(lambda x: x.numpy()).FlattenItems()


def _assert_close(got, want, tol=1e-5):
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, a), (_, b) in zip(got, want):
        assert np.isfinite(a).all(), path
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol, err_msg=path)


def test_the_scan_equals_the_layers_written_out(theta, trained):
    """Loss, metrics and gradients are equal, with all randomness on."""
    unrolled = _params(repeat=False).Instantiate()
    assert [p for p, _ in unrolled.VariableSpecs().FlattenItems()] == [
        p for p, _ in theta.FlattenItems()
    ]
    eagerly = _program(unrolled, True).python_function(theta, _batch().Transform(tf.constant))
    _assert_close(trained, eagerly.Transform(lambda x: x.numpy()).FlattenItems())
    assert all(np.abs(value).max() > 0 for path, value in trained if path.startswith("grads"))


def test_the_loss_is_made_of_its_parts(model, theta):
    """loss = label-smoothed cross-entropy + k sum of the MoE layers' aux losses; metrics a real token."""
    batch = _batch()
    logits, loss, metrics = _logits(model, theta, batch, STEP)
    p = model.p
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_probs, batch.tgt.labels[..., None], -1)[..., 0]
    smooth = 0.9 * nll + 0.1 * -log_probs.mean(-1)
    real = batch.tgt.segment_ids > 0
    moe = metrics.moe
    assert metrics.aux_loss > 0
    assert metrics.tokens == real.sum() == 10
    np.testing.assert_allclose(metrics.nll, nll[real].mean(), rtol=1e-5)
    np.testing.assert_allclose(
        loss, smooth[real].mean() + p.aux_loss_weight * metrics.aux_loss, rtol=1e-5
    )
    np.testing.assert_allclose(
        metrics.accuracy, (logits.argmax(-1) == batch.tgt.labels)[real].mean(), rtol=1e-6
    )
    assert moe.encoder.expert_load.shape == (2, E) and moe.decoder.dispatch_2.shape == (2,)


def test_packed_rows_equal_separate_rows(model, theta):
    """In inference each example has the same logits, token by token."""
    packed = _batch(src=[[1, 1, 1, 2, 2, 0]], tgt=[[1, 1, 2, 2, 2]])
    together = _logits(model, theta, packed)[0]
    for number in (1, 2):
        single = NestedMap()
        for name in ("src", "tgt"):
            mine = packed[name].segment_ids[0] == number
            single[name] = packed[name].Transform(lambda x, mine=mine: x[:, mine])
            single[name].segment_ids = np.ones_like(single[name].segment_ids)
        mine = packed.tgt.segment_ids[0] == number
        np.testing.assert_allclose(
            together[:, mine], _logits(model, theta, single)[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("seed", [None, STEP], ids=["inference", "training"])
def test_what_stands_in_the_padding_moves_nothing(model, theta, trained, seed):
    quiet = trained if seed is STEP else _loss_and_grads(model, theta, _batch(), seed)
    loud = _batch()
    for side, vocab in ((loud.src, V_SOURCE), (loud.tgt, V)):
        noise = np.random.RandomState(9).randint(0, vocab, side.ids.shape)
        for name in ("ids", "segment_pos", *(["labels"] if "labels" in side else [])):
            side[name] = np.where(side.segment_ids > 0, side[name], noise).astype(np.int32)
    _assert_close(_loss_and_grads(model, theta, loud, seed), quiet)


def test_a_batch_of_padding_alone_is_finite(model, theta):
    empty = _batch().Transform(np.zeros_like)
    values = dict(_loss_and_grads(model, theta, empty, STEP))
    assert all(np.isfinite(value).all() for value in values.values())
    assert values["metrics.tokens"] == 0


def test_steps_equal_the_whole_sequence(model, theta):
    """Two hypotheses a row in one flat cache: the logits of FProp, position by position."""
    batch_size, hyps, length = 2, 2, 4
    src = _side(V_SOURCE, 1, [[1] * 5, [1, 1, 1, 0, 0]]).Transform(tf.constant)
    ids = np.random.RandomState(4).randint(4, V, (batch_size, hyps, length)).astype(np.int32)

    whole = []
    for j in range(hyps):
        tgt = _side(V, 0, np.ones((batch_size, length)))
        tgt.ids = ids[:, j]
        tgt.labels = tgt.ids
        whole.append(_logits(model, theta, NestedMap(src=src, tgt=tgt))[0])

    cache = model.InitCache(theta, model.Encode(theta, src), hyps, length)
    for t in range(length):
        # Flat position u * J + j is step u of hypothesis j.
        past = np.arange(length) <= t
        mask = np.einsum("u,ij->iuj", past, np.eye(hyps)).reshape(hyps, length * hyps) > 0
        mask = tf.constant(np.tile(mask, [batch_size, 1, 1]))
        logits, cache = model.ExtendStep(
            theta, tf.constant(ids[:, :, t]), cache, tf.constant(t), mask
        )
        assert logits.dtype == tf.float32
        for j in range(hyps):
            np.testing.assert_allclose(logits[:, j], whole[j][:, t], rtol=1e-4, atol=2e-5)


def test_bfloat16_activations_are_close(model, theta):
    low = _params(fprop_dtype="bfloat16").Instantiate()
    assert {s.dtype for s in low.VariableSpecs().Flatten()} == {"float32"}
    want, _, full = _logits(model, theta, _batch())
    got, loss, metrics = _logits(low, theta, _batch())
    assert loss.dtype == metrics.nll.dtype == tf.float32
    assert 0 < np.abs(got - want).max() < 0.2
    np.testing.assert_allclose(metrics.nll, full.nll, rtol=0.02)


def test_meta_counts_by_hand():
    b, s, t = 3, 6, 5
    p = _params()
    p.moe.dispatcher = "einsum"
    meta = MtModel.FPropMeta(p, (b, s), (b, t))

    def attention(queries, keys):
        return 2 * M * N * K * b * (2 * queries + 2 * keys) + 4 * b * N * queries * keys * K

    def dense(time):
        return 4 * b * time * M * H

    def moe(time):
        size = b * time // G
        capacity = min(size, max(4, -(-2 * size // E)))
        tokens = G * size
        slots = E * capacity if capacity < size else E
        return 2 * tokens * M * E + 2 * 2 * tokens * slots * M + 4 * E * G * capacity * M * H

    encoder = 4 * attention(s, s) + 2 * dense(s) + 2 * moe(s)
    decoder = 4 * (attention(t, t) + attention(t, s)) + 2 * dense(t) + 2 * moe(t)
    assert meta.flops == encoder + decoder + 2 * b * t * M * V
    assert meta.out_shapes == ((b, t, V),)


def _parameters(p):
    """The closed form: embeddings, attention 4 M N K, norms 2 M, dense 2 M H, MoE M E + 2 E M H; no biases."""
    m, norm = p.model_dim, 2 * p.model_dim
    attention = 4 * m * p.num_heads * p.key_dim
    dense, moe = 2 * m * p.hidden_dim, p.num_experts * (m + 2 * m * p.hidden_dim)
    total = (p.source_vocab_size + p.target_vocab_size) * m
    for layers, attentions in ((p.num_encoder_layers, 1), (p.num_decoder_layers, 2)):
        total += layers * (attentions * (attention + norm) + norm)
        total += layers // 2 * (dense + moe) + norm
    return total


def test_parameters_follow_the_closed_form():
    large = registry.GetParams("mt.M4MoE2048E36L").task
    assert _parameters(large) == 619_366_506_496
    for p in (_params(), large):
        assert count_parameters(p.Instantiate().VariableSpecs().Flatten()) == _parameters(p)


def test_without_experts_every_layer_is_dense():
    p = _params(num_experts=0, num_encoder_layers=1, num_decoder_layers=3)
    dense = p.Instantiate()
    paths = [path for path, _ in dense.VariableSpecs().FlattenItems()]
    assert not any("router" in path for path in paths)
    loss, metrics = dense.FProp(
        dense.InitTheta(make_seed(1, 0)), _batch().Transform(tf.constant), seed=STEP
    )
    assert np.isfinite(loss) and "moe" not in metrics


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_an_odd_number_of_layers_with_experts(side):
    name = f"num_{side}_layers"
    with pytest.raises(ValueError, match=rf"task\.{name}=3: with experts, layers come in pairs"):
        _params(**{name: 3}).Instantiate()
