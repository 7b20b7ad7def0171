"""A run that begins with the weights of another: rows are matched by name, on any engine; misfits are errors."""

import numpy as np
import pytest
import tensorflow as tf
import toy_translation

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.checkpoints.init_from import (
    InitFromError,
    begin_from,
    describe,
    find_step,
)
from lingvo_moe.core.engine.engines import make_engine
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.core.sharding import Mesh, single_device
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary

_BY_TASK = "task.moe.router.level=task;task.moe.router.num_tasks={}"
_OLD_LANGUAGES, _NEW_LANGUAGES = ["de", "sw"], ["cy", "de", "sw"]


@pytest.fixture(scope="module")
def vocab() -> bytes:
    return toy_translation.train_vocab(toy_translation.sentences(200))


@pytest.fixture(scope="module")
def run(vocab, tmp_path_factory) -> TextRunDir:
    """Checkpoint 7 of a model that routes by language, with one more row than it has languages."""
    path = tmp_path_factory.mktemp("init_from") / "old"
    toy_translation.save_run(path, vocab, more=_BY_TASK.format(3), languages=_OLD_LANGUAGES)
    return TextRunDir(path)


@pytest.fixture(scope="module")
def new_vocabs() -> NestedMap:
    """Vocabularies of other words: pieces are new, gone, and at other ids."""

    def vocab(old: str, new: str) -> Vocabulary:
        lines = [line.replace(old, new) for line in toy_translation.sentences(200, seed=1)]
        return Vocabulary(toy_translation.train_vocab(lines))

    return NestedMap(source=vocab("tree", "rhyddid"), target=vocab("stone", "zigzag"))


def _task(vocabs: NestedMap, more: str = _BY_TASK.format(4)):
    return registry.GetParams("mt.M4Tiny", f"{_sizes(vocabs)};{more}").task


def _sizes(vocabs: NestedMap, beyond: int = 8) -> str:
    return ";".join(f"task.{side}_vocab_size={v.size + beyond}" for side, v in vocabs.items())


def _artifacts(vocabs: NestedMap, languages: list[str]) -> RunArtifacts:
    return text_artifacts(vocabs.Transform(lambda vocabulary: vocabulary.model_bytes), languages)


def _pieces(vocabulary: Vocabulary) -> list[str]:
    return vocabulary.Pieces(range(vocabulary.size))


def test_rows_go_by_their_names_on_any_engine(run, vocab, new_vocabs):
    task = _task(new_vocabs)
    beginning = begin_from(run.path, 7, task, _artifacts(new_vocabs, _NEW_LANGUAGES))
    specs = task.Instantiate().VariableSpecs()
    rng = np.random.RandomState(3)
    fresh = specs.Transform(lambda s: rng.normal(size=s.shape).astype(s.dtype))
    thetas = []
    for engine in (TfEngine(), PjrtEngine(Mesh.parse("expert:8"))):
        state = NestedMap(theta=engine.Put(fresh, specs), step=np.int32(0))
        thetas.append(
            engine.Get(beginning.weights.Into(state, task.Instantiate(), engine)[0].theta)
        )
    theta, sharded = thetas
    for (path, value), other in zip(theta.FlattenItems(), sharded.Flatten(), strict=True):
        np.testing.assert_array_equal(value, other, err_msg=path)
    old, _ = load_theta(run, run.Task())
    named = {"source_embedding.table", "target_embedding.table"}
    for path, value in theta.FlattenItems():
        if path not in named and not path.endswith("task_emb"):
            np.testing.assert_array_equal(value, old.GetItem(path), err_msg=path)
    for side in ("source", "target"):
        before, after = _pieces(Vocabulary(vocab)), _pieces(new_vocabs[side])
        assert after != before[: len(after)] and 0 < len(set(after) & set(before)) < len(after)
        path = f"{side}_embedding.table"
        got = 0
        for i, row in enumerate(theta.GetItem(path)):
            known = i < len(after) and after[i] in before
            got += known
            want = old.GetItem(path)[before.index(after[i])] if known else fresh.GetItem(path)[i]
            np.testing.assert_array_equal(row, want, err_msg=f"{path} {i}")
        assert got == beginning.about["kept"][f"{side} pieces"][0] > 260
    tables = [p for p in dict(theta.FlattenItems()) if p.endswith("task_emb")]
    assert len(tables) == 2
    for path in tables:  # [L,U,M]: cy is new, de and sw have moved, the fourth has no language
        got, was, new = (t.GetItem(path) for t in (theta, old, fresh))
        np.testing.assert_array_equal(got[:, 1:3], was[:, 0:2])
        np.testing.assert_array_equal(got[:, [0, 3]], new[:, [0, 3]])
    assert beginning.about["kept"]["languages"] == [2, 3]
    assert "at step 7; " in describe(beginning.about)


def test_another_model_is_refused_with_what_differs(run, new_vocabs):
    task = _task(new_vocabs, f"{_BY_TASK.format(4)};task.hidden_dim=64;task.num_experts=16")
    with pytest.raises(InitFromError) as error:
        begin_from(run.path, 7, task, _artifacts(new_vocabs, _NEW_LANGUAGES))
    message = str(error.value)
    assert f"--init_from={run.path}: " in message
    assert "float32[1,8,16,32] there, float32[1,16,16,64] here" in message
    assert "and 5 more" in message
    assert "> task.num_experts : 8\n" in message and message.endswith("< task.num_experts : 16")
    assert "vocab_size" not in message and "num_tasks" not in message
    dense = _task(new_vocabs, "task.num_experts=0")
    with pytest.raises(InitFromError, match=r"float32\[1,16,2,8\] there, float32\[2,"):
        begin_from(run.path, 7, dense, _artifacts(new_vocabs, _NEW_LANGUAGES))


def test_heads_that_share_keys_are_no_languages(vocab, tmp_path):
    more = "task.num_heads=4;task.num_kv_heads={}"
    toy_translation.save_run(tmp_path, vocab, more=more.format(2), languages=_OLD_LANGUAGES)
    vocabs = NestedMap(source=Vocabulary(vocab), target=Vocabulary(vocab))
    task = TextRunDir(tmp_path).Params().task
    beginning = begin_from(tmp_path, 7, task, _artifacts(vocabs, _OLD_LANGUAGES[::-1]))
    assert beginning.weights.moved == {} and "languages" not in beginning.about["kept"]
    task.num_kv_heads = 1
    with pytest.raises(InitFromError, match=r"< task\.num_kv_heads : 1"):
        begin_from(tmp_path, 7, task, _artifacts(vocabs, _OLD_LANGUAGES))


def test_where_there_is_nothing_to_begin_from(run, tmp_path):
    assert find_step(run.path) == find_step(run.path, 7) == 7
    with pytest.raises(InitFromError, match=r"--init_from_step=8: .* there are \[7\]"):
        find_step(run.path, 8)
    with pytest.raises(RunDirError, match=r"--init_from=.*no run there"):
        find_step(tmp_path)
    TextRunDir(tmp_path).Write("mt.M4Tiny", "", text_artifacts({"source": b"s", "target": b"t"}))
    with pytest.raises(InitFromError, match="has no checkpoint yet"):
        find_step(tmp_path)


@pytest.mark.parametrize("encoder_layers, experts, seed", [
    (4, "task.moe.router=hash", np.array([3, 4], np.int32)),
    # A second expert is drawn at random in training.
    (2, "task.moe.router=top2;task.moe.num_shared_experts=1", None),
    # M4Tiny's dense layers are 32 wide.
    (2, "task.moe.router=hash;task.moe.num_shared_experts=3;task.expert_hidden_dim=8", None),
], ids=["hash", "top2", "narrow"])  # fmt: skip
def test_experts_grow_out_of_dense_layers(vocab, tmp_path, encoder_layers, experts, seed):
    """Before its first step a model with experts has the loss of the dense one."""
    both = f"task.num_encoder_layers={encoder_layers};task.activation=swiglu;task.repeat=False"
    dense_only = f"{both};task.num_experts=0"
    toy_translation.save_run(tmp_path, vocab, more=dense_only, languages=["de"])
    vocabs = NestedMap(source=Vocabulary(vocab), target=Vocabulary(vocab))
    more = f"{both};{experts};task.moe.dispatcher=dropless;task.aux_loss_weight=0"
    params = registry.GetParams("mt.M4Tiny", f"{_sizes(vocabs, 0)};{more}")
    beginning = begin_from(tmp_path, 7, params.task, _artifacts(vocabs, ["de"]))
    assert "out of whose smaller model this one grew" in describe(beginning.about)
    engine = make_engine("tf_graph", single_device())
    task, dense = params.task.Instantiate(), TextRunDir(tmp_path).Task()
    rng, specs = np.random.RandomState(3), task.VariableSpecs()
    fresh = specs.Transform(lambda s: rng.normal(size=s.shape).astype(s.dtype))
    state = NestedMap(theta=engine.Put(fresh, specs), step=np.int32(0))
    theta = beginning.weights.Into(state, task, engine)[0].theta
    routers = [path for path, _ in fresh.FlattenItems() if ".router." in path]
    assert len(routers) == 2  # gating networks, or tables of hashes
    for path in routers:
        np.testing.assert_array_equal(engine.Get([theta.GetItem(path)])[0], fresh.GetItem(path))
    batch_spec = params.input.Instantiate().BatchSpec()
    batch = toy_translation.batch(batch_spec, 200)

    def loss(model: MtModel, theta: NestedMap) -> np.ndarray:
        def run(theta: NestedMap, batch: NestedMap) -> tf.Tensor:
            return model.FProp(theta, batch, seed=seed)[0]

        return engine.Get([engine.Build(run, [model.VariableSpecs(), batch_spec])(theta, batch)])[0]

    old = engine.Put(load_theta(TextRunDir(tmp_path), dense)[0], dense.VariableSpecs())
    np.testing.assert_allclose(loss(task, theta), loss(dense, old), rtol=1e-6)


@pytest.mark.parametrize("narrower", [False, True])
def test_an_expert_has_the_slots_of_the_dense_layer(narrower):
    override = (
        "task.optimizer=adafactor;task.num_encoder_layers=4;task.hidden_dim=256;task.model_dim=256"
    )
    shared = "task.moe.num_shared_experts=1" + ";task.expert_hidden_dim=128" * narrower
    task, dense = (
        registry.GetParams("mt.M4Tiny", f"{override};{more}").task.Instantiate()
        for more in (shared, "task.num_experts=0")
    )
    rng = np.random.RandomState(0)
    small = dense.StateSpecs().slots.Transform(lambda s: rng.normal(size=s.shape).astype("f"))
    specs = task.StateSpecs().slots
    grown = task.Grow(small, specs.Transform(lambda s: tf.zeros(s.shape)))
    for (path, slot), spec in zip(grown.FlattenItems(), specs.Flatten(), strict=True):
        assert tuple(slot.shape) == spec.shape, path
    old = small.encoder.blocks.body.layers[0].ffn.wi
    new = grown.encoder.blocks.body.layers[1].ffn.experts.wi
    assert set(old) == set(new)
    for name in old:  # [L,...] in blocks of one layer, [L,E,...] in blocks of two
        for expert in (0, 7):
            one = new[name][:, expert]
            last = (slice(None), *(slice(-n, None) for n in one.shape[1:]))
            np.testing.assert_array_equal(one, old[name][1::2][last])
