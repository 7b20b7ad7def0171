"""Scores of given translations equal the search's own scores of its results, and the training loss."""

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
import toy_translation as toy
from rows import assert_rows_equal, bound

from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decode_step import Decoder
from lingvo_moe.tasks.text.batches.rows_of_pairs import Shape, to_batch
from lingvo_moe.tasks.text.quality.forced_decoding import ScoreOptions, Scorer
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

SOURCES = toy.sentences(4, 1, 6)
TARGETS = toy.sentences(4, 2, 6)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TextRunDir:
    """A model with more target embeddings than the vocabulary has pieces."""
    path = tmp_path_factory.mktemp("run")
    vocab = toy.train_vocab(toy.sentences(200), bytes_too=False)
    size = sentencepiece.SentencePieceProcessor(model_proto=vocab).vocab_size()
    toy.save_run(path, vocab, more=f"task.target_vocab_size={size + 7};task.repeat=False")
    return TextRunDir(path)


@pytest.fixture(scope="module")
def scorer(run) -> Scorer:
    return Scorer(run.path, ScoreOptions(max_source_length=16, max_length=16, rows=4))


def test_equals_what_the_search_reports(run, scorer):
    vocabs = run.vocabs.Transform(Vocabulary)
    sources = vocabs.source.EncodeBatch(SOURCES)
    src = to_batch([[(ids, [])] for ids in sources], Shape(4, 16, 16, pack=False)).src
    task = run.Task()
    theta = load_theta(run, task)[0].Transform(tf.constant)
    options = SearchOptions(beam_size=3, top_k=2, length_alpha=0.0)
    decoder = Decoder(task, options, 12, vocabs.target.size)

    @tf.function(autograph=False)
    def search():
        with use_mesh(single_device()):
            found = decoder.Search(theta, src.Transform(tf.constant), tf.constant([12, 12, 9, 5]))
        return found.ids_BKT, found.lengths_BK, found.scores_BK

    ids_BKT, lengths_BK, scores_BK = (x.numpy() for x in search())
    assert len({*lengths_BK.ravel()}) > 1
    for k in range(2):
        targets = [ids[: n - 1].tolist() for ids, n in zip(ids_BKT[:, k], lengths_BK[:, k])]
        pairs = [(s, t, (0,)) for s, t in zip(sources, targets)]
        found_BT, _ = scorer._run((16, 16), pairs)
        np.testing.assert_allclose(found_BT.sum(1), scores_BK[:, k], rtol=1e-4, atol=1e-4)
        assert (found_BT[np.arange(16) >= lengths_BK[:, k : k + 1]] == 0).all()


def test_one_program_has_the_capacities_of_each_length(tmp_path):
    """The number of tokens that an expert chooses follows from the tokens of the batch."""
    vocab = toy.train_vocab(toy.sentences(50), bytes_too=False)
    more = "task.moe.router=expert_choice;task.decoder_router=top2;task.moe.dispatcher=einsum"
    toy.save_run(tmp_path, vocab, more=f"{more};task.repeat=False")
    scorer = Scorer(tmp_path, ScoreOptions(max_source_length=32, max_length=32, rows=4))
    run = TextRunDir(tmp_path)
    task, theta = run.Task(), load_theta(run, run.Task())[0].Transform(tf.constant)
    rng = np.random.default_rng(0)
    for length in (8, 32):
        pairs = [(rng.integers(4, 30, length - 1), rng.integers(4, 30, 5), (0,)) for _ in range(4)]
        batch = to_batch([[pair] for pair in pairs], Shape(4, length, length, pack=False))
        with use_mesh(single_device()):
            wanted_BT, _ = task.LogProbs(
                theta, batch.Transform(tf.constant), scorer._vocabs.target.size
            )
        found_BT, _ = scorer._run((length, length), pairs)
        np.testing.assert_allclose(found_BT, wanted_BT, rtol=1e-4, atol=1e-4)
    assert scorer.programs == 1


def test_a_score_is_its_pairs_own(scorer):
    scores = scorer.Score(SOURCES, TARGETS)
    alone = [scorer.Score([s], [t])[0] for s, t in zip(SOURCES, TARGETS)]
    for together, one in zip(scores, alone):
        assert_rows_equal(together.token_log_probs, one.token_log_probs)
        assert together.pieces[-1] == "</s>" and not together.truncated
        assert together.log_prob == pytest.approx(one.token_log_probs.sum(), rel=bound(1e-6, 1e-5))
        assert len(one.token_log_probs) == len(one.pieces) and (one.token_log_probs < 0).all()
    assert scorer.programs == 1  # of all buckets
    many = scorer.Score(SOURCES * 3, TARGETS * 3)
    assert_rows_equal([m.log_prob for m in many], [s.log_prob for s in scores * 3])
    assert scorer.Score([], []) == []


def test_scores_have_the_experts_of_each_place(run, scorer):
    recording = Scorer(run.path, ScoreOptions(max_source_length=16, max_length=16, experts=True))
    layers = len(run.Task().Metrics().Layers()["moe/decoder"])
    for score, plain in zip(recording.Score(SOURCES, TARGETS), scorer.Score(SOURCES, TARGETS)):
        assert score.experts.shape == (len(score.pieces), layers, 2) and plain.experts is None
        assert (np.sort(score.experts)[..., 1] > np.sort(score.experts)[..., 0]).all()
        np.testing.assert_allclose(score.token_log_probs, plain.token_log_probs, atol=1e-4)


def test_long_and_empty_sides(scorer):
    long, empty, both = scorer.Score(["red " * 3000, "red", ""], ["green", "", ""])
    assert long.truncated and not empty.truncated and not both.truncated
    assert empty.pieces == both.pieces == ["</s>"]
    assert empty.log_prob != both.log_prob
    cut = scorer.Score(["red"], ["green " * 40])[0]
    assert cut.truncated and len(cut.pieces) == 16
    with pytest.raises(ValueError, match=r"max_length=0: must be an integer from 1"):
        ScoreOptions(max_length=0)


def test_a_mean_of_checkpoints(tmp_path):
    vocab = toy.train_vocab(toy.sentences(50), bytes_too=False)
    for step, factor in ((3, 1.0), (5, 2.0), (9, 6.0)):
        toy.save_run(tmp_path, vocab, step=step, planted=lambda _, value, f=factor: value * f)
    run = TextRunDir(tmp_path)
    task = run.Task()
    first, last = (load_theta(run, task, Chosen(step))[0] for step in (3, None))
    for step, steps, factor in ((None, [3, 5, 9], 3.0), (5, [3, 5], 1.5)):
        mean, about = load_theta(run, task, Chosen(step, len(steps)))
        assert about["averaged_steps"] == steps
        for got, one in mean.Zip(first):
            np.testing.assert_allclose(got, factor * one, rtol=1e-5, atol=1e-6)
    newest, about = load_theta(run, task, Chosen(None, 1))
    assert about["step"] == 9 and "averaged_steps" not in about
    assert all((a == b).all() for a, b in newest.Zip(last))
    with pytest.raises(ValueError, match=r"--average_last=3: .* has 2 up to there, \[3, 5\]"):
        load_theta(run, task, Chosen(5, 3))
    with pytest.raises(ValueError, match="step 4: there is no such checkpoint"):
        load_theta(run, task, Chosen(4, 2))
