"""Strings in, translations out: batches, buckets, unusual lines, and the graph that is saved."""

from dataclasses import replace

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
import toy_translation as toy
from numpy.testing import assert_array_equal

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, Translator

# Under XLA two buckets, 8 and 16; compiling one is a second.
OPTIONS = TranslateOptions(
    beam_size=3, top_k=2, max_source_length=16, max_length=20, rows=4, xla=True
)
TENSORFLOW = replace(OPTIONS, rows=5, xla=False)
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


@pytest.fixture(scope="module", params=[OPTIONS, TENSORFLOW], ids=["xla", "tensorflow"])
def translator(vocab, request) -> Translator:
    return make(vocab, request.param)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return toy.sentences(60, seed=1, longest=12) + ODD


def in_batches(translator: Translator, lines, size: int) -> NestedMap:
    parts = [translator.Translate(lines[i : i + size]) for i in range(0, len(lines), size)]
    return NestedMap(
        translations=[row for p in parts for row in p.translations],
        scores=np.concatenate([p.scores for p in parts]),
        truncated=np.concatenate([p.truncated for p in parts]),
    )


def test_batch_size_changes_nothing(translator, lines):
    """Neither scores nor traces change with the batch size.

    Bit-identical under XLA, whose programs always have the same number of rows. With TensorFlow's kernels the toy's own
    products, also those of single rows, round in two ways (MtModel's do not: test_fast_model.py).
    """
    whole = translator.Translate(lines)
    traces = translator.traces
    assert len(OPTIONS.Buckets()) == 2
    assert traces == (2 if translator.options.xla else 1)
    for size in (1, 7, 32):
        got = in_batches(translator, lines, size)
        assert got.translations == whole.translations
        rtol = 0 if translator.options.xla else 1e-6
        np.testing.assert_allclose(got.scores, whole.scores, rtol=rtol)
        assert_array_equal(got.truncated, whole.truncated)
    assert translator.traces == traces
    assert len({t[0] for t in whole.translations}) > 20


@pytest.fixture(scope="module")
def short(lines) -> list[str]:
    """Lines of the smallest bucket."""
    return [line for line in lines if len(line) < 20 and line.isascii()]


def test_rows_and_results(vocab, translator, short):
    """The number of rows affects speed only; top_k sets how many results are returned."""
    want = translator.Translate(short)
    options = replace(translator.options, top_k=1, max_source_length=8, rows=7)
    got = make(vocab, options).Translate(short)
    assert [t[0] for t in got.translations] == [t[0] for t in want.translations]
    np.testing.assert_allclose(got.scores[:, 0], want.scores[:, 0], rtol=1e-5)
    assert (want.scores[:, 0] >= want.scores[:, 1]).all()


@pytest.fixture(scope="module")
def padded(vocab) -> Translator:
    """A translator with one bucket, longer than necessary."""
    options = replace(OPTIONS, max_source_length=40)
    object.__setattr__(options, "Buckets", lambda: [40])
    return make(vocab, options)


def test_padding_changes_nothing(padded, translator, short):
    want, got = translator.Translate(short), padded.Translate(short)
    assert padded.traces == 1
    assert got.translations == want.translations
    np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)


def test_blank_lines_are_empty_translations(translator):
    got = translator.Translate(["", "  ", "\u3000", "\ufeff", "\t", "red"])
    assert [row[0] for row in got.translations[:5]] == [""] * 5
    assert_array_equal(got.scores[:5], 0)
    assert got.scores[5, 0] < 0
    assert not got.truncated.any()
    assert translator.Translate([]).translations == []


def test_whatever_a_line_holds_it_is_one_line(translator):
    """Invalid UTF-8 and a thousand lines of random bytes: translations have no line ends and no controls."""
    rng = np.random.default_rng(0)
    lines = [bytes(rng.integers(0, 256, rng.integers(0, 40), np.uint8)) for _ in range(300)]
    got = translator.Translate(lines)
    assert len(got.translations) == len(lines)
    for row in got.translations:
        for text in row:
            assert len(text.splitlines()) <= 1
            assert not any(ord(c) < 32 or ord(c) == 127 for c in text)
            assert text == text.strip()
    assert any("\ufffd" in text for row in got.translations for text in row)  # bytes do come out


def test_long_lines_are_cut_and_reported(translator):
    fits = " ".join(["red"] * 10)
    long = " ".join(["red"] * 30)
    got = translator.Translate([fits, long, "x" * 3_000_000, "日" * 100_000])
    assert_array_equal(got.truncated, [False, True, True, True])


def test_other_weights_in_the_same_programs(vocab, translator, short):
    """After SetTheta the results equal those of a translator made with these weights, and back."""
    traces = translator.traces
    size = sentencepiece.SentencePieceProcessor(model_proto=vocab).vocab_size()
    model = toy.ToyModel(size + 3, size + 5)
    first = translator.Translate(short)
    translator.SetTheta(model.InitTheta(1))
    other = translator.Translate(short)
    translator.SetTheta(model.InitTheta(0))
    assert translator.Translate(short).translations == first.translations != other.translations
    again = make(vocab, translator.options, seed=1)
    assert again.Translate(short).translations == other.translations
    assert translator.traces == traces


def test_program_sees_the_tokens(vocab):
    """The encoder gets each line's pieces and EOS, and PAD in segment 0 after it."""
    seen = []

    class Spy(toy.ToyModel):
        def Encode(self, theta, src):
            seen.append(src)
            return super().Encode(theta, src)

    processor = sentencepiece.SentencePieceProcessor(model_proto=vocab)
    size = processor.vocab_size()
    spy = Spy(size, size)
    translator = Translator(spy, spy.InitTheta(), NestedMap(source=vocab, target=vocab), OPTIONS)
    ids = processor.encode("red house")
    program = translator._search(8)
    tf.config.run_functions_eagerly(True)
    try:
        padded = tf.constant([ids + [2] + [9] * (7 - len(ids))] * 4)
        program(padded, tf.constant([len(ids) + 1, 0, 1, 0]))
    finally:
        tf.config.run_functions_eagerly(False)
    (src,) = seen
    n = len(ids) + 1
    assert_array_equal(src.ids[0], ids + [2] + [0] * (8 - n))
    assert_array_equal(src.segment_ids[0], [1] * n + [0] * (8 - n))
    assert_array_equal(src.segment_pos[0], list(range(n)) + [0] * (8 - n))
    assert not src.segment_ids[1].numpy().any()


def test_translations_are_in_the_target_vocabulary(vocab, short):
    """Another target vocabulary gives another text: it detokenises the ids."""
    words = ["eins zwei drei vier acht neun zehn elf"] * 20
    target = toy.train_vocab(words, 290)
    sizes = [
        sentencepiece.SentencePieceProcessor(model_proto=v).vocab_size() for v in (vocab, target)
    ]
    model = toy.ToyModel(*sizes)
    got = Translator(
        model, model.InitTheta(), NestedMap(source=vocab, target=target), TENSORFLOW
    ).Translate(short)
    text = " ".join(row[0] for row in got.translations)
    assert "z" in text
    assert "b" not in text.replace("\ufffd", "")


def test_vocabulary_larger_than_the_model(vocab):
    model = toy.ToyModel(10, 1000)
    with pytest.raises(ValueError, match=r"source vocabulary has \d+ pieces, .* is 10"):
        Translator(model, model.InitTheta(), NestedMap(source=vocab, target=vocab))


@pytest.mark.parametrize("name", ["beam_size", "top_k", "max_source_length", "max_length", "rows"])
def test_options_that_make_no_sense(name):
    with pytest.raises(ValueError, match=name):
        TranslateOptions(**{name: 0})


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
