"""A checkpoint's tokenizer.json as the vocabulary of a language model: trained with, scored, continued, exported."""

import importlib.util
import itertools
import json
import sys

import numpy as np
import pytest
import toy_text
from hypothesis import example, given, strategies as st

from lingvo_moe.core.config import registry
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.lm.generator import GenerateOptions, load_generator
from lingvo_moe.tasks.lm.saved_generator import SavedGenerator, Texts
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.decoding.export import export
from lingvo_moe.tasks.text.quality.forced_decoding import Scorer
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import (
    CONFIG,
    NAME,
    JsonVocabulary,
    _without_broken_bytes,
)

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
    TextRunDir(tmp_path / "run").Write("lm.Tiny", "", inputs.Artifacts())
    of_run = params.Set(vocab_dir=str(tmp_path / "run" / "vocab")).Instantiate().Prepare()
    np.testing.assert_array_equal(next(iter(of_run)).ids, batch.ids)


@needs_library
@pytest.mark.slow
def test_texts_of_a_run_and_of_its_export(directory, tmp_path):
    toy_text.save_run(tmp_path / "run", vocab=JsonVocabulary.Load(directory).model_bytes)
    options = GenerateOptions(max_source_length=8, max_length=16)
    generator, about = load_generator(tmp_path / "run", options)
    prompts = ["the red house, grün", "", "\ud800"]
    settings = [Sampling(12), Sampling(16, 0.9, seed=3), Sampling(9, 2.0, seed=4)]
    want = generator.Generate(prompts, settings)
    assert [one.truncated for one in want] == [True, False, False]
    assert max(one.tokens for one in want) > 4
    vocabulary = generator.vocabulary
    ids = [[BEGIN, *vocabulary.Encode(prompt)] for prompt in ("the red house, grün", "")]
    assert generator.Generate(ids, settings[:2]) == want[:2]
    export(generator, tmp_path / "model", about)
    saved = SavedGenerator(tmp_path / "model")
    assert saved.Generate(prompts, settings) == want
    for prompt, each, one in zip(prompts, settings, want):
        assert "".join(part for part, _ in saved.Stream(prompt, each)) == one.text

    (score,) = Scorer(tmp_path / "run").Score([""], ["the grün"])
    assert score.pieces[0] == "the" and score.pieces[-1] == "<|end|>"
    assert len(score.pieces) == len(score.token_log_probs) == 8


@needs_library
@pytest.mark.slow
def test_each_id_that_ends_an_answer_ends_it(directory, tmp_path):
    content = json.loads(JsonVocabulary.Load(directory).model_bytes)

    def answer():
        toy_text.save_run(tmp_path / "run", vocab=json.dumps(content).encode())
        generator = load_generator(tmp_path / "run", GenerateOptions(max_length=16))[0]
        (one,) = generator.Generate(["the"], [Sampling(12, 1.0, seed=5, logprobs=True)])
        return one, [piece for piece, _ in one.logprobs]

    whole, pieces = answer()
    last = max(range(12), key=lambda i: pieces.index(pieces[i]))  # a piece that is new there
    content["eos_token_id"] = [content[NAME]["model"]["vocab"][pieces[last]]]
    ended, before = answer()
    assert whole.finish_reason == "length" and (ended.finish_reason, last > 2) == ("stop", True)
    assert before == pieces[:last]


def _spelled(letters, data):
    return [*letters, *(f"<0x{byte:02X}>" for byte in data)]


@given(st.lists(st.tuples(st.text("a▁日", max_size=2), st.binary(max_size=9)), max_size=4))
@example(
    [("a", "日é🙂日".encode()[:-1]), ("▁", "\ufffd▁".encode()), ("", b"\xe6\x97a\xf0\x9f\xff")]
)
def test_bytes_of_a_run_are_read_as_python_reads_them(parts):
    runs = [_spelled(letters, data) for letters, data in parts]
    pieces = _without_broken_bytes(itertools.chain(*runs))
    got, want = b"", ""
    for piece in pieces:
        got += bytes([int(piece[3:5], 16)]) if len(piece) == 6 else piece.encode()
    for is_byte, run in itertools.groupby(itertools.chain(*runs), lambda piece: len(piece) == 6):
        own = [*run]
        data = bytes(int(piece[3:5], 16) for piece in own) if is_byte else "".join(own).encode()
        want += data.decode("utf-8", "replace")
    assert got.decode() == want


def save_byte_fallback(directory):
    """A tokenizer as that of Llama 2: pieces of letters, and one for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *_spelled("", range(256)), *"▁the", "he"]
    blank = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    content = {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {
            "type": "Sequence",
            "decoders": [blank, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [["h", "e"]],
        },
    }
    (directory / NAME).write_text(json.dumps(content))
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / CONFIG).write_text(json.dumps(marks))
    return directory


def _stream(vocabulary, ids):
    """The parts of a stream of ids that come one by one after a prompt, and the whole answer."""

    class Steps(Texts):
        def __init__(self):
            self.vocabulary, self.options = vocabulary, GenerateOptions()
            self.left = [*ids]

        def Pool(self, pages):
            return []

        def Fill(self, places, pool):
            return pool

        def Step(self, places, more, pool):
            rows = len(places[0])
            return pool, np.full([rows, 1], self.left.pop(0)), np.zeros([rows, 1]), {}

    steps = Steps()
    parts = [text for text, _ in steps.Stream("the ", Sampling(len(ids)))]
    return parts, steps._Text(vocabulary.Encode("the "), ids)


@needs_library
@pytest.mark.parametrize("save", [save_tokenizer, save_byte_fallback])
def test_a_character_that_is_not_whole_spoils_no_other(save, tmp_path):
    vocabulary = JsonVocabulary.Load(save(tmp_path))
    text = "the 日本é🙂▁語"
    blank = "▁" if save is save_tokenizer else " "  # which the letter stands for
    assert vocabulary.Decode(vocabulary.Encode(text)) == text.replace("▁", blank)
    ids = vocabulary.Encode("日本é🙂")
    for number in range(1, len(ids) + 1):
        parts, answer = _stream(vocabulary, ids[:number])
        assert "".join(parts) == answer
        assert answer == "日本é🙂".encode()[:number].decode("utf-8", "replace")
    broken = [i for n, i in enumerate(ids) if n not in (1, 9)]
    data = bytes(byte for n, byte in enumerate("日本é🙂".encode()) if n not in (1, 9))
    parts, answer = _stream(vocabulary, broken)
    assert "".join(parts) == answer == data.decode("utf-8", "replace")


def _edited(content, *path_and_value):
    *path, last, value = path_and_value
    place = content
    for name in path:
        place = place[name]
    place[last] = value
    return content


_HOSTILE = {
    "a panic of the library": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
    "another": ("model", "continuing_subword_prefix", "xxx"),
    "half of a surrogate pair": ("model", "unk_token", "\ud800"),
    "no token": ("model", "vocab", {}),
    "no model": ("model", None),
    "an id beyond 32 bits": ("model", "vocab", {"</s>": 2**32}),
    "a merge of nothing": ("model", "merges", [["x", "y"]]),
    "a broken pattern": ("normalizer", {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
}  # fmt: skip


@needs_library
@pytest.mark.parametrize("edit", _HOSTILE.values(), ids=_HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(edit, tmp_path, capfd):
    save_byte_fallback(tmp_path)
    content = _edited(json.loads((tmp_path / NAME).read_text()), *edit)
    (tmp_path / NAME).write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        JsonVocabulary.Load(tmp_path)
    assert str(tmp_path / NAME) in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # where the library writes of a panic


@needs_library
def test_a_file_nested_too_deeply_or_no_file_is_refused(tmp_path):
    save_byte_fallback(tmp_path)
    for data in (b"[" * 100_000, b"\xff\xfe", b"", b"9" * 10_000, b"NaN", b"[]", b'"x"'):
        (tmp_path / NAME).write_bytes(data)
        with pytest.raises(DataError, match=NAME):
            JsonVocabulary.Load(tmp_path)
    save_byte_fallback(tmp_path)
    for marks in (
        [],
        3,
        None,
        {"eos_token": 3},
        {"eos_token": ["</s>"]},
        {"eos_token": {"content": None}},
    ):
        (tmp_path / CONFIG).write_text(json.dumps(marks))
        with pytest.raises(DataError, match="eos_token"):
            JsonVocabulary.Load(tmp_path)


@needs_library
def test_a_tokenizer_that_panics_at_a_text_is_named(tmp_path):
    vocabulary = JsonVocabulary.Load(save_byte_fallback(tmp_path))

    class Panics:
        def encode_batch(self, *args, **kwargs):
            raise BaseException("index out of\nbounds")

    vocabulary._tokenizer = Panics()
    with pytest.raises(DataError, match=r"tokenizer.json: .* fails at a text: index out of bounds"):
        vocabulary.Encode("the")


@needs_library
def test_a_stream_sends_characters_whole(directory):
    """The four bytes of an emoji are four tokens: none is sent before the last."""
    vocabulary = JsonVocabulary.Load(directory)
    parts, _ = _stream(vocabulary, vocabulary.Encode("é🙂!"))
    assert parts == ["", "é", "", "", "", "🙂", "!"]
