"""A checkpoint's tokenizer.json as the vocabulary of a language model: trained with, scored, continued, exported."""

import importlib.util
import json
import sys

import numpy as np
import pytest
import tensorflow as tf
import toy_text

from lingvo_moe.core.config import registry
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.lm.generator import GenerateOptions, load_generator
from lingvo_moe.tasks.lm.saved_generator import SavedGenerator, Texts
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.decoding.export import export
from lingvo_moe.tasks.text.quality.forced_decoding import Scorer
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import CONFIG, NAME, JsonVocabulary

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="needs tokenizers: pip install --no-deps -r requirements-tokenizers.txt",
)
TEXT = "the red house, grün 🙂, <|end|>\n  the"
BEGIN, END = 258, 259


def save_tokenizer(directory):
    """A byte-level tokenizer with two merges, th and the, and two marks after all pieces, as Llama 3 has them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]
    merges = [["t", "h"], ["th", "e"]]
    vocab = {piece: i for i, piece in enumerate([*letters, *map("".join, merges)])}
    levels = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {
        "special": True
    }
    marks = {"<|begin|>": BEGIN, "<|end|>": END}
    content = {
        "added_tokens": [{"id": i, "content": mark, **added} for mark, i in marks.items()],
        "pre_tokenizer": levels,
        "decoder": levels,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    (directory / NAME).write_text(json.dumps(content))
    config = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "pad_token": None}
    (directory / CONFIG).write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@needs_library
def test_ids_are_those_of_the_file_and_marks_in_a_text_are_text(directory):
    found = JsonVocabulary.Load(directory)
    assert (found.bos_id, found.eos_id, found.pad_id, found.unk_id) == (BEGIN, END, END, -1)
    assert found.size == 260
    ids = found.Encode(TEXT)
    assert ids[0] == ids[-1] == 257 and not {BEGIN, END} & {*ids}
    assert found.EncodeBatch([TEXT, ""]) == [ids, []]
    assert found.Decode([BEGIN, *ids, END, 5]) == TEXT
    assert found.Pieces([257, END]) == ["the", "<|end|>"]
    again = JsonVocabulary(found.model_bytes)
    assert again.Encode(TEXT) == ids and again.model_bytes == found.model_bytes


@needs_library
def test_what_is_missing_is_named(directory, tmp_path):
    with pytest.raises(DataError, match=f"{NAME}.*expected a file of a checkpoint"):
        JsonVocabulary.Load(tmp_path)
    save_tokenizer(tmp_path)
    for content, message in (
        ({}, 'must name the mark of a text\'s end, as "eos_token"'),
        ({"eos_token": "</s>"}, "names eos_token='</s>', which is no token of tokenizer.json"),
    ):
        (tmp_path / CONFIG).write_text(json.dumps(content))
        with pytest.raises(DataError, match=message):
            JsonVocabulary.Load(tmp_path)


def test_without_the_library_an_error_says_what_to_install(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install --no-deps -r requirements-tokenizers.txt"):
        JsonVocabulary.Load(directory)


@needs_library
def test_rows_have_the_tokenizer_s_ids_and_marks(directory, tmp_path):
    (tmp_path / "some.txt").write_text("the house\n" * 20)
    params = registry.GetParams("lm.Tiny").input
    params.Set(data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"), vocab_dir=str(directory))
    with pytest.raises(DataError, match=r"260 ids, .*target_vocab_size=260;task.vocab_size=260"):
        params.Instantiate().Prepare()
    inputs = params.Set(target_vocab_size=260).Instantiate().Prepare()
    batch = next(iter(inputs))
    ids = inputs.vocabs.target.Encode("the house")
    np.testing.assert_array_equal(batch.ids[0, : len(ids) + 1], [BEGIN, *ids])
    np.testing.assert_array_equal(batch.labels[0, : len(ids) + 1], [*ids, END])
    again = params.Instantiate().Prepare(artifacts=inputs.Artifacts())
    np.testing.assert_array_equal(next(iter(again)).ids, batch.ids)


@needs_library
@pytest.mark.slow
def test_texts_of_a_run_and_of_its_export(directory, tmp_path):
    toy_text.save_run(tmp_path / "run", vocab=JsonVocabulary.Load(directory).model_bytes)
    options = GenerateOptions(max_source_length=8, max_length=16)
    generator, about = load_generator(tmp_path / "run", options)
    prompts = ["the red house, grün", "", "\ud800"]
    settings = [Sampling(12), Sampling(16, 0.9, seed=3), Sampling(9, 2.0, seed=4)]
    want = generator.Generate(prompts, settings)
    assert want.truncated.tolist() == [True, False, False] and max(want.tokens) > 4
    export(generator, tmp_path / "model", about)
    saved = SavedGenerator(tmp_path / "model")
    found = saved.Generate(prompts, settings)
    assert found.texts == want.texts and found.tokens.tolist() == want.tokens.tolist()
    for prompt, each, text in zip(prompts, settings, want.texts):
        assert "".join(part for part, _ in saved.Stream(prompt, each)) == text

    (score,) = Scorer(tmp_path / "run").Score([""], ["the grün"])
    assert score.pieces[0] == "the" and score.pieces[-1] == "<|end|>"
    assert len(score.pieces) == len(score.token_log_probs) == 8


@needs_library
def test_a_stream_sends_characters_whole(directory):
    """The four bytes of an emoji are four tokens: none is sent before the last."""
    vocabulary = JsonVocabulary.Load(directory)
    ids = vocabulary.Encode("é🙂!")

    class Steps(Texts):
        def __init__(self):
            self.vocabulary, self.options = vocabulary, GenerateOptions()
            self.begin = lambda *_: [1]
            self.more = lambda n: ([n + 1], tf.constant(ids[:n]), n == len(ids), True)

    steps = Steps()
    parts = [text for text, _ in steps.Stream("the ", Sampling(9))]
    assert parts == ["", "é", "", "", "", "🙂", "!"]
