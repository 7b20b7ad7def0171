"""A translation model whose router is chosen by name: a training step, decoding steps, and loading from its run.

Letters: B row, S source time, T target time, V vocabulary, J hypothesis.
"""

import numpy as np
import pytest
import tensorflow as tf
import toy_translation as toy

from lingvo_moe.core.config import registry
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.moe.layer import ROUTERS
from lingvo_moe.core.moe.routers.hash import HashRouter
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions
from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.input.mt_input import MtInput
from lingvo_moe.tasks.mt.input.tasks import task_numbers
from lingvo_moe.tasks.mt.runs.run_dir import RunDir
from lingvo_moe.tasks.mt.serving.export import load_translator

V, B, S, T = 30, 2, 6, 4
SMALL = (
    f"task.source_vocab_size={V};task.target_vocab_size={V};task.model_dim=8;task.hidden_dim=8;"
    "task.num_heads=2;task.key_dim=4;task.num_encoder_layers=2;task.num_decoder_layers=2;"
    "task.num_experts=4;task.num_groups=2;task.repeat=False;"
)
BY_LANGUAGE = "task.moe.router=top_k;task.moe.router.level=task;task.moe.router.num_tasks=3"


def test_an_override_names_the_router_and_what_is_in_it():
    p = registry.GetParams("mt.M4Tiny", "task.moe.router=top_k;task.moe.router.k=1")
    assert p.task.moe.router.cls is TopKRouter and p.task.moe.router.k == 1
    p = registry.GetParams("mt.M4Tiny", "task.decoder_router=hash")
    assert p.task.decoder_router.cls is HashRouter
    assert p.task.moe.router == registry.GetParams("mt.M4Tiny").task.moe.router
    path = f"{HashRouter.__module__}/HashRouter"
    p = registry.GetParams("mt.M4Tiny", f"task.moe.router.cls=type/{path};task.moe.router.k=3")
    assert (p.task.moe.router.cls, p.task.moe.router.k) == (HashRouter, 3)


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_params_text_reads_back_whatever_is_chosen(name):
    p = registry.GetParams("mt.M4Tiny", f"task.decoder_router={name};task.moe.router={name}")
    assert p.task.moe.router.cls is ROUTERS[name]
    fresh = registry.GetParams("mt.M4Tiny", "task.moe.router=lsh")
    assert fresh.FromText(p.ToText()).ToText() == p.ToText()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.moe.router=top_2", r"no such choice: 'top_2' \(did you mean 'top2'"),
        ("task.moe.router=Switch", r"known: expert_choice, hash, lsh"),
        ("task.moe.router=hash;task.moe.router.kk=1", r"no parameter .*did you mean 'k'"),
        ("task.moe.router.cls=type/lingvo_moe.core.files.files/only_one", "is no class"),
    ],
)
def test_mistakes_in_names(override, message):
    with pytest.raises(registry.RegistryError, match=message):
        registry.GetParams("mt.M4Tiny", override)


def test_the_input_tells_languages_only_to_models_that_ask():
    assert registry.GetParams("mt.M4Tiny", BY_LANGUAGE).input.task_ids
    assert not registry.GetParams("mt.M4Tiny", "task.moe.router=hash").input.task_ids
    dense = BY_LANGUAGE + ";task.num_experts=0"
    assert not registry.GetParams("mt.M4Tiny", dense, skip_derived=True).input.task_ids


def test_a_decoder_does_not_look_ahead():
    override = SMALL + "task.moe.router=expert_choice"
    with pytest.raises(ValueError, match=r"moe\.router: ExpertChoiceRouter looks at later tokens"):
        registry.GetParams("mt.M4Tiny", override).task.Instantiate()
    override = SMALL + "task.decoder_router=top2;task.decoder_router.level=sentence"
    with pytest.raises(ValueError, match=r"decoder_router: Top2Router looks at later tokens"):
        registry.GetParams("mt.M4Tiny", override).task.Instantiate()


def _model(override: str):
    return registry.GetParams("mt.M4Tiny", SMALL + override).task.Instantiate()


def _side(rng, segments, tasks):
    segments = np.array(segments, np.int32)
    real = (segments > 0).astype(np.int32)
    position = np.array(
        [[list(row[:t]).count(row[t]) for t in range(len(row))] for row in segments]
    )
    return NestedMap(
        ids=rng.integers(4, V, segments.shape).astype(np.int32) * real,
        segment_ids=segments,
        segment_pos=position.astype(np.int32) * real,
        task_ids=np.array(tasks, np.int32)[:, None] * real,
    )


def _batch(rng, tasks=(2, 0)):
    src = _side(rng, [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]], tasks)
    tgt = _side(rng, [[1] * T, [1] * T], tasks)
    return NestedMap(src=src, tgt=NestedMap(tgt, labels=tgt.ids))


def _logits(model, theta, batch):
    """[B,T,V] of a full pass in inference."""
    seen, shard = [], model.softmax.Shard
    model.softmax.Shard = lambda x, letters: seen.append(x) or shard(x, letters)
    try:
        model.FProp(theta, batch.Transform(tf.constant), seed=None)
    finally:
        del model.softmax.Shard
    return seen[0].numpy()


@pytest.mark.parametrize(
    "override",
    [
        "task.moe.router=expert_choice;task.decoder_router=hash;task.decoder_router.k=2",
        "task.moe.router=top_k;task.moe.router.level=sentence;task.decoder_router=top_k;"
        "task.decoder_router.level=task;task.decoder_router.num_tasks=3",
    ],
    ids=["experts choose, then hash", "by sentence, then by task"],
)
def test_trains_a_step_and_decodes_as_the_whole_pass(override):
    model = _model(override)
    rng = np.random.default_rng(0)
    batch = _batch(rng)
    with use_mesh(single_device()):
        state = model.InitState(tf.constant(3))
        after, metrics = model.TrainStep(state, batch.Transform(tf.constant))
        assert np.isfinite(metrics.loss) and after.skipped == 0
        moved = {
            path: np.abs(a - b).max()
            for (path, a), b in zip(after.theta.FlattenItems(), state.theta.Flatten())
            if ".ffn." in path
        }
        assert moved and all(change > 0 for change in moved.values()), moved

        # Weights far from the small initial ones, so that experts matter.
        theta = state.theta.Transform(lambda w: 3.0 * w)
        whole = _logits(model, theta, batch)
        cache = model.InitCache(theta, model.Encode(theta, batch.src.Transform(tf.constant)), 1, T)
        for t in range(T):
            mask = tf.constant(np.tile(np.arange(T) <= t, [B, 1, 1]))
            ids = tf.constant(batch.tgt.ids[:, t : t + 1])
            step, cache = model.ExtendStep(theta, ids, cache, tf.constant(t), mask)
            np.testing.assert_allclose(step[:, 0], whole[:, t], rtol=1e-4, atol=1e-4)
        if "task_ids" in cache:
            other = batch.Transform(lambda x: x)
            other.tgt.task_ids = 1 - batch.tgt.task_ids * 0
            assert np.abs(_logits(model, theta, other) - whole).max() > 1e-3  # the task does decide


def test_a_model_by_language_needs_it_in_its_batches():
    model = _model(BY_LANGUAGE)
    batch = _batch(np.random.default_rng(0))
    del batch.src["task_ids"]
    with use_mesh(single_device()), pytest.raises(ValueError, match=r"\.ffn routes by task_ids"):
        model.FProp(model.InitTheta(tf.constant([1, 2])), batch.Transform(tf.constant))


class _OfLanguages(MtInput):
    """An input whose data has these languages."""

    def __init__(self, languages):
        super().__init__(MtInput.Params())
        self._found = languages

    def Artifacts(self):
        return RunArtifacts(about={"languages": list(self._found)})


def test_tasks_are_languages_by_number():
    assert task_numbers(["sw", "de"], None) == [1, 0]
    assert task_numbers(["sw", "de"], ["af", "de", "sw"]) == [2, 1]
    with pytest.raises(DataError, match=r"'dee' is none of the 2 .*did you mean 'de'"):
        task_numbers(["dee"], ["de", "sw"])
    model = _model(BY_LANGUAGE)
    model.CheckData(_OfLanguages("abc"))
    with pytest.raises(TaskError, match="num_tasks=3, but the data has 4 languages"):
        model.CheckData(_OfLanguages("abcd"))


@pytest.mark.slow
def test_a_run_is_read_back_and_asked_for_languages(tmp_path):
    vocab = toy.train_vocab(toy.sentences(200), bytes_too=False)
    small = "task.num_encoder_layers=2;task.num_decoder_layers=2;"
    languages = ["af", "de", "sw"]
    toy.save_run(tmp_path, vocab, more=small + BY_LANGUAGE, languages=languages)
    run = RunDir(tmp_path)
    params = run.Params()
    assert params.task.moe.router.cls is TopKRouter and run.languages == languages
    text = (tmp_path / "params.txt").read_text()
    assert registry.GetParams("mt.M4Tiny").FromText(text) == params

    options = TranslateOptions(beam_size=2, max_source_length=8, max_length=6, rows=2)
    translator, _ = load_translator(tmp_path, options)
    line = toy.sentences(1, seed=5, longest=5)[0]
    out = translator.Translate([line] * 3, languages)
    alone = [translator.Translate([line], lang).scores[0, 0] for lang in languages]
    np.testing.assert_allclose(out.scores[:, 0], alone, rtol=1e-5)
    assert len(set(np.round(alone, 4).tolist())) > 1, "the language decides nothing"
    with pytest.raises(ValueError, match="routes by the source language: give it"):
        translator.Translate([line])
    with pytest.raises(ValueError, match=r"unknown source language.*knows af, de, sw"):
        translator.Translate([line], "xx")
    inputs = translator.translate.get_concrete_function().structured_input_signature[0]
    assert [spec.name for spec in inputs] == ["text", "language"]
