"""Searches over a mesh, and the programs that they are made of.

Letters: B row, S source token, J hypothesis.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import toy_translation as toy

from lingvo_moe.core.config import registry
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decode_step import decode_programs
from lingvo_moe.tasks.mt.decoding.translator import (
    TranslateOptions,
    Translator,
    load_translator,
    read_parts,
)
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.text.decoding.leading import PlacedWeights
from lingvo_moe.tasks.text.quality.forced_decoding import ScoreOptions, Scorer
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

OPTIONS = TranslateOptions(beam_size=3, top_k=2, max_source_length=8, max_length=9, rows=6)
LINES = [*toy.sentences(9, seed=1, longest=5), ""]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    # So little room that experts are reached in several rounds, e.g. by the first step, whose tokens are all the same.
    more = "task.num_experts=4;task.moe.exchange_factor=0.05"
    toy.save_run(path, toy.train_vocab(toy.sentences(200)), more=more)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, more", [("expert:4", {}), ("expert:2", {"sampling": Sampling(temperature=1.0, seed=3)})]
)
def test_translations_over_a_mesh_are_those_of_one_host(logdir, mesh, more):
    """Bucket 8 alone; more lines than rows, which are rounded up to divide over the devices."""
    options = replace(OPTIONS, **more)
    want = load_translator(logdir, options)[0].Translate(LINES)
    translator, about = load_translator(logdir, options, engine=PjrtEngine(mesh))
    assert about["step"] == 7 and translator.options.rows == (8 if mesh == "expert:4" else 6)
    out = translator.Translate(LINES)
    assert out.translations == want.translations
    assert len({row[0] for row in out.translations}) > 5 and out.translations[-1] == ["", ""]
    np.testing.assert_allclose(out.scores, want.scores, rtol=1e-4 if more else 2e-5)
    search = translator.mesh_search
    assert search.programs == 2  # for all lines
    theta = search.theta
    assert theta.decoder.blocks.body.layers[1].ffn.experts.wi.sharding.num_devices == int(mesh[-1])
    if not more:
        check_programs(search)
    translator.SetTheta(theta.Transform(lambda x: x * 0.5))
    assert translator.Translate(LINES).translations != out.translations
    assert search.programs == 2


def test_programs_are_kept_by_the_class_of_a_model_and_the_size_of_a_vocabulary(logdir):
    """Arguments of a program do not say how many of the model's tokens it may choose from."""

    class Other(MtModel):
        pass

    (model, _, vocabs, _), _ = read_parts(logdir, NEWEST, trust_run=False)
    placed = PlacedWeights(PjrtEngine("expert:2"), NestedMap())
    smaller, params = (
        toy.train_vocab(toy.sentences(200), bytes_too=False),
        TextRunDir(logdir).Params().task,
    )
    params.cls = Other
    other = params.Instantiate()
    texts = {
        Translator(one, placed, NestedMap(source=vocab, target=vocab), OPTIONS).mesh_search._text
        for one in (model, other)
        for vocab in (vocabs.source, smaller)
    }
    assert len(texts) == 4


def check_programs(search):
    """A step asks how many rounds there are, goes to the experts and back in each, and asks whether all are done.

    Caches are donated.
    """
    (_, begin, block) = next(iter(search._built.values()))
    kinds = Counter(c.kind for c in begin.Collectives())
    assert kinds == {"all-to-all": 3, "all-reduce": 1}
    collectives = block.Collectives()
    assert [c.kind for c in collectives].count("all-to-all") == 3
    more = [
        c for c in collectives if c.kind != "all-to-all"
    ]  # what a host wants to know, after the block
    assert {c.kind for c in more} == {"all-reduce", "all-gather"}
    assert all(c.num_bytes <= 8 * 9 * 3 * 4 for c in more)
    signature = block.program.signature
    donated = {signature.args[i].name.partition(".")[0] for i in signature.donated}
    assert donated == {"state", "cache"}


@pytest.mark.slow
def test_scores_over_a_mesh_are_those_of_one_host(logdir):
    options = ScoreOptions(8, 8, rows=4)
    host, mesh = (
        Scorer(logdir, options, engine=engine) for engine in (None, PjrtEngine("expert:4"))
    )
    pairs = LINES[:6], LINES[3:9]
    for one, other in zip(host.Score(*pairs), mesh.Score(*pairs), strict=True):
        assert one.pieces == other.pieces
        np.testing.assert_allclose(other.token_log_probs, one.token_log_probs, rtol=1e-5, atol=1e-5)


def test_nothing_is_made_while_the_papers_largest_is_described():
    """The caches of 32,768 rows are arguments, never allocated: for each layer two tensors of 286 GB."""
    params = registry.GetParams("mt.M4MoE2048E36L")
    task = params.task.Instantiate()
    step = decode_programs(task, params.input.batch_size, 128, beam_size=4)[1]
    state, cache, theta = step.arg_specs
    k = cache.decoder[8][1].k
    assert k == TensorSpec((32768, 16, 266, 4, 128), "float32", ("expert", None, None, None, None))
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
    cache = decode_programs(params.task.Instantiate(), 256, 8)[1].arg_specs[1]
    heads = heads or params.task.num_heads
    for each in (cache.decoder[1][0].k, cache.decoder[1][0].v):
        assert each == TensorSpec(
            (256, heads, 26, 4, 64), "float32", ("data", axis, None, None, None)
        )
    memory = TensorSpec((256, 8, heads, 64), "float32", ("data", None, axis, None))
    assert cache.memory[1][0].k == memory
