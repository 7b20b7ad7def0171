"""Strings in, translations out: batches, buckets, unusual lines, and the graph that is saved."""

from dataclasses import replace

import numpy as np
import pytest
import sentencepiece
import toy_translation as toy
from numpy.testing import assert_array_equal

from lingvo_moe.core.config import registry
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding import fast_decoder
from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, Translator, load_translator
from lingvo_moe.tasks.text.decoding import kept_graph
from lingvo_moe.tasks.text.decoding.export import export

OPTIONS = TranslateOptions(beam_size=3, top_k=2, max_source_length=16, max_length=20, rows=5)
ODD = [
    "",
    " ",
    "\t",
    "\ufeff",
    "\0",
    "\u2028",
    "red\u2028green",
    "a\0b",
    "\u3000",
    "日本語",
    "é" * 9,
]


@pytest.fixture(scope="module")
def vocab() -> bytes:
    return toy.train_vocab(toy.sentences(200))


def make(vocab: bytes, options: TranslateOptions = OPTIONS, seed: int = 0) -> Translator:
    size = sentencepiece.SentencePieceProcessor(model_proto=vocab).vocab_size()
    model = toy.ToyModel(size + 3, size + 5)  # larger than the vocabulary, as with a small corpus
    return Translator(model, model.InitTheta(seed), NestedMap(source=vocab, target=vocab), options)


@pytest.fixture(scope="module")
def translator(vocab) -> Translator:
    return make(vocab)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return toy.sentences(30, seed=1, longest=12) + ODD


def in_batches(translator: Translator, lines, size: int) -> NestedMap:
    parts = [translator.Translate(lines[i : i + size]) for i in range(0, len(lines), size)]
    return NestedMap(
        translations=[row for p in parts for row in p.translations],
        scores=np.concatenate([p.scores for p in parts]),
        truncated=np.concatenate([p.truncated for p in parts]),
    )


def test_batch_size_changes_nothing(translator, lines):
    """Neither scores nor traces change with the batch size.

    The toy's own products, also those of single rows, round in two ways (MtModel's do not: test_fast_decoder.py).
    """
    whole = translator.Translate(lines)
    traces = translator.traces
    assert traces == 1
    for size in (1, 7):
        got = in_batches(translator, lines, size)
        assert got.translations == whole.translations
        np.testing.assert_allclose(got.scores, whole.scores, rtol=1e-6)
        assert_array_equal(got.truncated, whole.truncated)
    assert translator.traces == traces
    assert len({t[0] for t in whole.translations}) > 20


def test_other_weights_in_the_same_search(vocab, translator, lines):
    """After SetTheta the results equal those of a translator made with these weights, and back."""
    traces, first = translator.traces, translator.Translate(lines)
    translator.SetTheta(translator._model().InitTheta(1))
    got, want = translator.Translate(lines), make(vocab, seed=1).Translate(lines)
    translator.SetTheta(translator._model().InitTheta(0))
    assert translator.Translate(lines).translations == first.translations != got.translations
    assert got.translations == want.translations
    assert_array_equal(got.scores, want.scores)
    assert translator.traces == traces


def test_a_kept_search_is_not_traced_again(vocab, translator, lines, monkeypatch, tmp_path):
    """A translator reads it at the next start, with the weights of then, and can be exported."""
    entries: dict[str, bytes] = {}
    monkeypatch.setattr(fast_decoder, "key_of", lambda *_: "k")
    monkeypatch.setattr(kept_graph, "find_bytes", entries.get)
    monkeypatch.setattr(kept_graph, "keep_bytes", entries.__setitem__)
    want = translator.Translate(lines)
    first, again = make(vocab, seed=1), make(vocab)
    assert first.Translate(lines).translations != want.translations
    results = [again.Translate(lines)]
    export(again, tmp_path / "model", {"model": "toy"})
    results.append(SavedTranslator(tmp_path / "model").Translate(lines))
    assert [*entries] == ["k"] and (first.traces, again.traces) == (1, 0)
    for got in results:
        assert got.translations == want.translations
        assert_array_equal(got.scores, want.scores)


def test_long_lines_are_cut_and_reported(translator):
    fits = " ".join(["red"] * 10)
    long = " ".join(["red"] * 30)
    got = translator.Translate([fits, long, "x" * 3_000_000, "日" * 100_000])
    assert_array_equal(got.truncated, [False, True, True, True])


def test_vocabulary_larger_than_the_model(vocab):
    model = toy.ToyModel(10, 1000)
    with pytest.raises(ValueError, match=r"source vocabulary has \d+ pieces, .* is 10"):
        Translator(model, model.InitTheta(), NestedMap(source=vocab, target=vocab))


def test_buckets():
    assert TranslateOptions(max_source_length=100).Buckets() == [8, 16, 32, 64, 100]
    assert TranslateOptions(max_source_length=8).Buckets() == [8]
    assert TranslateOptions(max_source_length=5).Buckets() == [5]
    options = TranslateOptions(max_length=20)
    assert [options.MaxTargetLength(n) for n in (1, 5, 6)] == [12, 20, 20]


def test_byte_pieces_become_characters(vocab):
    """The tokenizer in the graph spells characters outside the vocabulary like the trainer's."""
    import tensorflow_text as tf_text

    processor = sentencepiece.SentencePieceProcessor(model_proto=vocab)
    tokenizer = tf_text.SentencepieceTokenizer(model=vocab)
    for text in ["red € 日本", "ﬁne\u00a0house", "🌳 tree"]:
        ids = processor.encode(text)
        assert tokenizer.tokenize(text).numpy().tolist() == ids
        assert tokenizer.detokenize(ids).numpy().decode() == processor.decode(ids)


def test_drawn_translations_depend_on_line_and_seed_alone(vocab, lines):
    def drawn(seed):
        options = replace(OPTIONS, top_k=2, sampling=Sampling(temperature=1.0, seed=seed))
        return make(vocab, options)

    one = drawn(3)
    alone, together = (in_batches(one, lines, size) for size in (1, 41))
    assert alone.translations == together.translations
    np.testing.assert_allclose(alone.scores, together.scores, rtol=1e-5)
    assert (np.diff(together.scores, axis=1) <= 0).all()  # best first
    different = [first != second for first, second in together.translations]
    assert sum(different) > 30  # though they are of one line
    other = drawn(4).Translate(lines)
    assert sum(a != b for a, b in zip(other.translations, together.translations)) > 30
    assert together.translations[30:32] == [["", ""]] * 2 and not together.scores[30:32].any()


def test_scores_are_normalised_as_the_run_says(tmp_path, vocab):
    """An option that is not given is None, in every command."""
    assert make(vocab, OPTIONS).options.length_alpha == 0.6
    toy.save_run(tmp_path, vocab, more=f"{toy.SMALL};task.length_alpha=1.25")
    for given, alpha in ((None, 1.25), (0.0, 0.0)):
        translator, _ = load_translator(tmp_path, replace(OPTIONS, length_alpha=given))
        assert translator.options.length_alpha == alpha
        assert translator.options.Search().length_alpha == alpha
    assert registry.GetParams("mt.M4Demo").task.length_alpha == 1.5
