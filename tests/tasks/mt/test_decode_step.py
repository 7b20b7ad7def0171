"""The step of the search as a program: a Python loop over it finds the translator's results.

Letters: B row, S source token, J hypothesis, K result.
"""

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
import toy_translation as toy

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from lingvo_moe.tasks.mt.decode_step import Decoder, decode_step
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, Translator

ROWS, S = 8, 8
OPTIONS = TranslateOptions(
    beam_size=3, top_k=1, max_source_length=S, max_length=9, rows=ROWS, xla=True
)
LENGTHS = np.array([8, 5, 1, 0, 2, 3, 8, 6], np.int32)


@pytest.fixture(scope="module")
def vocab() -> bytes:
    return toy.train_vocab(toy.sentences(200))


@pytest.fixture(scope="module")
def task(vocab):
    size = sentencepiece.SentencePieceProcessor(model_proto=vocab).vocab_size()
    override = f"task.source_vocab_size={size};task.target_vocab_size={size};task.num_experts=2"
    return registry.GetParams("mt.M4Tiny", override).task.Instantiate()


@pytest.fixture(scope="module")
def theta(task):
    with use_mesh(single_device()):
        theta = task.InitTheta(make_seed(4, 0)).Transform(lambda w: w.numpy())
    # EOS competes with the others: some rows end early, at different steps.
    theta.target_embedding.table[2] *= 3.0
    return theta


@pytest.fixture(scope="module")
def src(task):
    ids = np.random.RandomState(0).randint(4, task.p.source_vocab_size, (ROWS, S))
    at_BS = np.tile(np.arange(S), (ROWS, 1))
    real = at_BS < LENGTHS[:, None]
    values = NestedMap(ids=ids * real, segment_ids=real, segment_pos=at_BS * real)
    return values.Transform(lambda x: x.astype(np.int32))


@pytest.fixture(scope="module")
def found(task, theta, src, vocab):
    """(ids, lengths, scores) of the translator's own program."""
    translator = Translator(task, theta, NestedMap(source=vocab, target=vocab), OPTIONS)
    out = translator._search(S)(tf.constant(src.ids), tf.constant(LENGTHS))
    return [x.numpy() for x in out]


def _loop(task, theta, src, mesh):
    """Runs the step's program in a loop on the host; returns it, the last state and the caches."""
    decoder = Decoder(task, OPTIONS.Search(), OPTIONS.max_length)
    with use_mesh(single_device()):
        max_lengths = tf.where(LENGTHS > 0, OPTIONS.MaxTargetLength(tf.constant(LENGTHS)), 0)
        start = decoder.Start(theta.Transform(tf.constant), src.Transform(tf.constant), max_lengths)
    state, cache = (tree.Transform(lambda x: x.numpy()) for tree in start)
    step = decode_step(task, ROWS, S, OPTIONS.beam_size, OPTIONS.max_length)
    engine = PjrtEngine(mesh)
    program = engine.BuildStep(step)
    theta = engine.Put(theta, task.VariableSpecs())
    host = state
    while host.time < OPTIONS.max_length and not host.done_B.all():
        state, cache = program(state, cache, theta)
        host = engine.Get(state)
    return program, host.Transform(tf.constant), cache


@pytest.mark.slow
def test_a_loop_over_the_step_is_the_translators_search(task, theta, src, found):
    """Its caches and its state are donated."""
    program, state, cache = _loop(task, theta, src, Mesh.parse("expert:2"))
    results = Decoder(task, OPTIONS.Search(), OPTIONS.max_length).search.Results(state)
    ids, lengths, scores = found
    assert len({tuple(row) for row in ids[:, 0]}) > 4 and len(set(lengths[:, 0].tolist())) > 2
    np.testing.assert_array_equal(results.lengths_BK, lengths)
    np.testing.assert_array_equal(results.ids_BKT, ids)
    np.testing.assert_allclose(results.scores_BK, scores, rtol=1e-5)
    k = cache.decoder[0][1].k
    assert k.addressable_shards[0].data.shape == (OPTIONS.max_length, 4, 3, 2, 8)
    # To the experts and back, and how many rows, in the MoE layer; nothing else leaves a device.
    assert [c.kind for c in program.Collectives()] == ["all-to-all"] * 3
    signature = program.program.signature
    donated = [signature.args[i].name for i in signature.donated]
    assert {name.partition(".")[0] for name in donated} == {"state", "cache"}
    assert len(donated) == len([*state.Flatten(), *cache.Flatten()])


def test_nothing_is_made_while_the_papers_largest_is_described():
    """The caches of 32,768 rows are arguments, never allocated: for each layer two tensors of 286 GB."""
    params = registry.GetParams("mt.M4MoE2048E36L")
    task = params.task.Instantiate()
    step = decode_step(task, params.input.batch_size, 128, beam_size=4)
    state, cache, theta = step.arg_specs
    k = cache.decoder[8][1].k
    assert k == TensorSpec((266, 32768, 4, 16, 128), "float32", (None, "expert", None, None, None))
    assert cache.memory[0][0].v.split == ("expert", None, None, None)
    assert cache.cross_mask.dtype == "bool"
    assert state.mask_BJS == TensorSpec((32768, 4, 1064), "bool", ("expert", None, None))
    assert state.time.shape == ()
    assert theta.Flatten() == task.VariableSpecs().Flatten()


@pytest.mark.parametrize(
    "heads, split, axis", [(0, {}, "model"), (1, {}, None), (8, {"A": "model"}, "model")]
)
def test_heads_are_sharded_where_training_shards_them(heads, split, axis):
    """Fewer heads of keys are replicated over the devices of a row, unless the split names them."""
    params = registry.GetParams("mt.T96L", f"task.num_kv_heads={heads};task.num_decoder_layers=2")
    params.task.activation_split.update(split)
    cache = decode_step(params.task.Instantiate(), 256, 8).arg_specs[1]
    heads = heads or params.task.num_heads
    for each in (cache.decoder[1][0].k, cache.decoder[1][0].v):
        assert each == TensorSpec(
            (26, 256, 4, heads, 64), "float32", (None, "data", None, axis, None)
        )
    memory = TensorSpec((256, 8, heads, 64), "float32", ("data", None, axis, None))
    assert cache.memory[1][0].k == memory
