"""An ensemble gives each token the mean of its models' probabilities."""

import numpy as np
import pytest
import sentencepiece
import toy_translation as toy

from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.ensemble import Ensemble, load_ensemble
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator
from lingvo_moe.tasks.text.decoding.line_stream import one_line
from tools import translate

_OPTIONS = TranslateOptions(
    beam_size=2, top_k=2, max_source_length=8, max_length=10, rows=4, length_alpha=0.0
)


@pytest.fixture(scope="module")
def vocab() -> bytes:
    return toy.train_vocab(toy.sentences(200))


def test_probabilities_are_averaged(vocab):
    size = sentencepiece.SentencePieceProcessor(model_proto=vocab).vocab_size()
    models = [toy.ToyModel(size, size) for _ in range(2)]
    thetas = [model.InitTheta(seed) for seed, model in enumerate(models)]
    ids = np.array([[5, 9, 7, 2]], np.int32)
    src = NestedMap(ids=ids, segment_ids=np.ones_like(ids), segment_pos=np.arange(4)[np.newaxis])
    token, mask = np.array([[1]], np.int32), np.ones([1, 1, 3], bool)

    def logits(model, theta):
        cache = model.InitCache(theta, model.Encode(theta, src), 1, 3)
        return model.ExtendStep(theta, token, cache, 0, mask)[0].numpy().astype(np.float64)

    both = logits(Ensemble(models), NestedMap(m0=thetas[0], m1=thetas[1]))
    each = [np.exp(logits(*of)) for of in zip(models, thetas)]
    mean = sum(one / one.sum() for one in each) / 2
    np.testing.assert_allclose(np.exp(both), mean, rtol=1e-4)


def test_runs_of_one_vocabulary_translate_together(vocab, tmp_path, capfd):
    options = _OPTIONS
    for name, sign in (("a", 1), ("b", -1)):
        planted = lambda _, value, sign=sign: sign * value  # noqa: E731
        toy.save_run(tmp_path / name, vocab, more=toy.SMALL, planted=planted)
    lines = toy.sentences(5, longest=5)
    one, _ = load_translator(tmp_path / "a", options)
    alone = one.Translate(lines)
    mixed, about = load_ensemble([(tmp_path / "a", NEWEST), (tmp_path / "b", NEWEST)], options)
    assert [member["step"] for member in about["members"]] == [7, 7]
    assert mixed.Translate(lines).translations != alone.translations
    other = toy.train_vocab(toy.sentences(100, seed=3), vocab_size=300)
    toy.save_run(tmp_path / "c", other, more=toy.SMALL)
    with pytest.raises(ValueError, match=r"/c has other vocabularies than .*/a; models of an"):
        load_ensemble([(tmp_path / "a", NEWEST), (tmp_path / "c", NEWEST)], options)
    flags = [f"--logdir={tmp_path}/a,{tmp_path}/b", "--beam_size=2", "--max_source_length=8"]
    flags += ["--max_length=10", "--length_alpha=0", "--quiet"]
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in lines))
    assert translate.main([*flags, f"--input={tmp_path}/in", f"--output={tmp_path}/out"]) == 0
    best = [one_line(row[0]) for row in mixed.Translate(lines).translations]
    assert (tmp_path / "out").read_text().split("\n")[:-1] == best
    assert translate.main([*flags, f"--input={tmp_path}/in", f"--shortlist={tmp_path}/in"]) == 1
    assert "goes with one run, not with an ensemble" in capfd.readouterr().err
