"""The translation model: its loss, packed and unpacked rows, and padding. tests/core/layers/test_transformer.py has its
stacks, and quality/test_forced_decoding.py its steps.

Letters: B row, T time, V vocabulary, M model, H hidden, N head, K key, E expert, G group.
"""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same

from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.tasks.mt.model import MtModel
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.text.runs.artifacts import VOCAB_FILES

V_SOURCE, V, M, H, N, K, E, G = 11, 13, 8, 16, 2, 4, 4, 3
STEP = make_seed(5, 7)


def _params():
    return MtModel.Params().Set(
        name="mt",
        source_vocab_size=V_SOURCE,
        target_vocab_size=V,
        model_dim=M,
        hidden_dim=H,
        num_heads=N,
        key_dim=K,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_experts=E,
        num_groups=G,
        repeat=False,
        attention_dropout=0.1,
        activation_split={},
        weight_split={},
    )


@pytest.fixture(scope="module")
def model():
    return _params().Instantiate()


@pytest.fixture(autouse=True)
def _one_device():
    with use_mesh(single_device()):
        yield


@pytest.fixture(scope="module")
def theta(model):
    with use_mesh(single_device()):
        return model.InitTheta(make_seed(1, 0))


@pytest.fixture(scope="module")
def step(model, theta):
    """A function batch -> results and gradients of a training step, traced once for all batches."""

    @tf.function(autograph=False)
    def run(theta, batch):
        leaves = theta.Flatten()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            loss, metrics = model.FProp(theta, batch, seed=STEP)
        return NestedMap(loss=loss, metrics=metrics, grads=theta.Pack(tape.gradient(loss, leaves)))

    return lambda batch: run(theta, batch.Transform(tf.constant)).Transform(lambda x: x.numpy())


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
    assert moe.encoder.expert_load.shape == (1, E) and moe.decoder.dispatch_2.shape == (1,)


def test_packed_rows_equal_separate_rows(model, theta):
    """Each example has the same logits in inference, token by token."""
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


def test_what_stands_in_the_padding_moves_nothing(step):
    quiet, loud = step(_batch()), _batch()
    for side, vocab in ((loud.src, V_SOURCE), (loud.tgt, V)):
        noise = np.random.RandomState(9).randint(0, vocab, side.ids.shape)
        for name in ("ids", "segment_pos", *(["labels"] if "labels" in side else [])):
            side[name] = np.where(side.segment_ids > 0, side[name], noise).astype(np.int32)
    assert_same(step(loud), quiet, floor=1.0)
    assert all(np.abs(gradient).max() > 0 for gradient in quiet.grads.Flatten())


def test_a_shared_table_is_the_same_one_for_source_and_target():
    """Its gradient is the sum of those of two equal tables."""
    sizes = {"source_vocab_size": V, "num_experts": 0, "num_encoder_layers": 1}
    apart = _params().Set(num_decoder_layers=1, **sizes).Instantiate()
    shared = _params().Set(num_decoder_layers=1, shared_embedding=True, **sizes).Instantiate()
    assert apart.Table(apart.STACKS[0]) == "source_embedding"
    theta = shared.InitTheta(make_seed(1, 0))
    tables = dict.fromkeys(("source_embedding", "target_embedding"), theta.embedding)
    others = {name: theta[name] for name in ("encoder", "decoder", "softmax") if name in theta}
    batch = _batch().Transform(tf.constant)

    def step(model, theta):
        leaves = theta.Flatten()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            loss, _ = model.FProp(theta, batch)
        return loss, theta.Pack(tape.gradient(loss, leaves))

    copies = NestedMap(tables, **others).Transform(tf.identity)
    (got, grads), (want, both) = step(shared, theta), step(apart, copies)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    total = both.source_embedding.table + both.target_embedding.table
    np.testing.assert_allclose(grads.embedding.table, total, rtol=1e-4, atol=1e-6)
    with pytest.raises(ParamError, match="shared_embedding=True: needs vocabularies of one size"):
        _params().Set(shared_embedding=True).Instantiate()


class _OfTwoVocabularies(MtInput):
    def Artifacts(self):
        vocabs = {"source": b"one", "target": b"another"}
        return RunArtifacts(files={VOCAB_FILES[side]: model for side, model in vocabs.items()})


def test_a_shared_table_is_of_one_vocabulary():
    model = _params().Set(source_vocab_size=V, shared_embedding=True).Instantiate()
    with pytest.raises(TaskError, match="vocabularies of source and target differ"):
        model.CheckData(_OfTwoVocabularies(MtInput.Params()))


def test_a_batch_of_padding_alone_is_finite(step):
    found = step(_batch().Transform(np.zeros_like))
    assert all(np.isfinite(value).all() for value in found.Flatten())
    assert found.metrics.tokens == 0
