import itertools
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from made_up_languages import WORDS

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.scan import scan
from lingvo_moe.tasks.text.decoding.tokenizer import tokenizer
from lingvo_moe.tasks.text.vocabulary.vocab_cache import (
    VocabOptions,
    _file_name,
    cached_vocabularies,
    sample_pairs,
)
from lingvo_moe.tasks.text.vocabulary.vocabulary import (
    Vocabulary,
    VocabularyTooLarge,
    _parts,
    check_symbols,
    train_vocabulary,
)

TEXTS = [
    "the house by the river",
    "Ein Haus am Fluß",
    "дом у реки",
    "一所房子在河边",
    "النهر",
    "नदी के किनारे",
    "%(name)s = {x}",
    *(" ".join(WORDS[i : i + 5]) for i in range(0, 400, 5)),
] * 4


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(train_vocabulary(TEXTS, 440, "target_vocab_size", "identity"))


@pytest.mark.parametrize(
    "text",
    [*TEXTS[:8], "emoji 😀🏳️‍🌈 never seen", "ʻōlelo ⅷ ﬁ ①", "می\u200cخواهم", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff"],
)
def test_every_character_comes_back(vocabulary, text):
    ids = vocabulary.Encode(text)
    assert 3 not in ids  # bytes spell what no piece does: nothing is unknown
    assert all(0 <= i < vocabulary.size for i in ids)
    assert vocabulary.Decode(ids) == text
    assert vocabulary.EncodeBatch([text, text]) == [ids, ids]


def test_special_ids(vocabulary):
    assert vocabulary.size == 440
    ids = vocabulary.Encode("river")
    assert vocabulary.Decode([1, *ids, 2, 0, 0]) == "river"
    assert vocabulary.Decode([1, *ids, 2, *ids]) == "river"
    assert vocabulary.Decode([]) == ""


def test_source_is_normalised():
    vocabulary = Vocabulary(train_vocabulary(TEXTS, 440, "source_vocab_size", "nfkc"))
    assert vocabulary.Encode("Ｈａｕｓ ①") == vocabulary.Encode("Haus 1")


def test_rare_characters_are_left_to_bytes_when_there_are_too_many():
    many = TEXTS + [chr(0x4E00 + i) for i in range(5000)]
    vocabulary = Vocabulary(train_vocabulary(many, 400, "source_vocab_size", "identity"))
    assert vocabulary.size == 400
    assert vocabulary.Decode(vocabulary.Encode(many[-1])) == many[-1]
    assert len(vocabulary.Encode(many[-1])) >= 3  # bytes
    assert vocabulary.Decode(vocabulary.Encode("the river")) == "the river"


def test_sizes_that_cannot_be():
    with pytest.raises(DataError, match=r"target_vocab_size=64000 is more .* at most") as error:
        train_vocabulary(TEXTS, 64_000, "target_vocab_size", "identity")
    most = int(str(error.value).split("at most ")[1].split()[0])
    assert Vocabulary(train_vocabulary(TEXTS, most, "target_vocab_size", "identity")).size == most
    with pytest.raises(VocabularyTooLarge, match=r"at most 26\d for 1 ") as error:
        train_vocabulary(["ab"], 300, "target_vocab_size", "identity")
    message = str(VocabOptions(300, 300).TooLarge({"target": error.value}))
    assert message.endswith("; the smallest vocabulary has 280: give more data")
    with pytest.raises(DataError, match="source_vocab_size=10 is too small"):
        train_vocabulary(TEXTS, 10, "source_vocab_size", "nfkc")


def test_most_is_what_fits_where_characters_are_many():
    rng = random.Random(0)
    texts = [
        "".join(chr(0x4E00 + min(int(rng.expovariate(0.01)), 3000)) for _ in range(20))
        for _ in range(60)
    ]
    with pytest.raises(VocabularyTooLarge) as error:
        train_vocabulary(texts, 4000, "size", "identity")
    most = error.value.most
    assert Vocabulary(train_vocabulary(texts, most, "size", "identity")).size == most
    with pytest.raises(VocabularyTooLarge, match=f"size={most + 1} .* at most {most} for"):
        train_vocabulary(texts, most + 1, "size", "identity")


@pytest.mark.parametrize("blank", [" ", ""])
def test_letters_of_long_texts_become_pieces(blank):
    rng = random.Random(0)
    words = ["".join(rng.choices("абвгдежзиклмнопрст", k=5)) for _ in range(200)]
    long = [blank.join(rng.choices(words, k=700)) for _ in range(4)]
    assert min(len(text.encode()) for text in long) > 6000
    others = ["знак ▅ щ", "нуль \0 ю"]  # SentencePiece passes over these, too
    found = Vocabulary(train_vocabulary([*TEXTS[:4], *long, *others], 400, "size", "identity"))
    assert not [c for c in "".join(words) + "щю" if len(found.Encode(c)) > 2]
    if blank:
        assert np.mean([len(found.Encode(word)) for word in words]) < 5


@given(st.lists(st.text("aжक𝔘 \t", max_size=9000), max_size=3))
@settings(deadline=None, max_examples=30)
def test_a_text_in_parts_is_whole(texts):
    for text in texts:
        parts = list(_parts(text))
        assert "".join(parts) == text
        assert all(len(part.encode()) <= 4192 for part in parts)
        for part, rest in itertools.pairwise(parts):
            assert rest[0] == " " or " " not in part[1:]


def test_broken_models(tmp_path):
    with pytest.raises(DataError, match=r"none\.model: No such file"):
        Vocabulary.Load(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"nothing like a model")
    with pytest.raises(DataError, match=r"bad\.model: not a SentencePiece model"):
        Vocabulary.Load(tmp_path / "bad.model")


def test_a_damaged_model_without_a_list_loads_or_is_named(vocabulary):
    model = vocabulary.model_bytes
    refused = []
    for at in range(0, min(6000, len(model)), 12):
        try:
            Vocabulary(model[:at] + bytes([model[at] ^ 0x80]) + model[at + 1 :], "x.model")
        except DataError as e:
            refused.append(str(e))
    assert len(refused) > 80
    assert all(message.startswith("x.model: ") for message in refused)


def test_cache(data_dir, tmp_path):
    found = scan(data_dir)
    said: list[str] = []
    options = VocabOptions(source_size=400, target_size=300)
    first = cached_vocabularies(found, options, tmp_path, said.append)
    assert (first.source.size, first.target.size) == (400, 300)
    assert any("training" in line for line in said)
    assert first.source.path.read_bytes() == first.source.model_bytes

    said.clear()
    again = cached_vocabularies(found, options, tmp_path, said.append)
    assert not said
    assert again.source.model_bytes == first.source.model_bytes

    other = cached_vocabularies(found, VocabOptions(410, 300), tmp_path)
    assert other.source.path != first.source.path
    assert other.target.path == first.target.path


def test_both_sides_are_told_at_once(data_dir, tmp_path):
    options = VocabOptions(20_000, 10_000, name="--{side}_vocab_size")
    with pytest.raises(DataError, match=r"target_vocab_size=10000 is more.*source_") as error:
        cached_vocabularies(scan(data_dir), options, tmp_path)
    most = re.search(r"set --target_vocab_size=(\d+) --source_vocab_size=(\d+)$", str(error.value))
    assert most
    fits = VocabOptions(int(most[2]), int(most[1]))
    assert cached_vocabularies(scan(data_dir), fits, tmp_path).source.size == int(most[2])


def test_the_sample_is_capped_and_small_languages_count(data_dir):
    sample = sample_pairs(scan(data_dir), temperature=5.0, limit=60)
    assert len(sample["source"]) == len(sample["target"]) <= 61
    by_language = [source[0] for source in sample["source"]]
    assert by_language.count("c") == 7
    assert 20 < by_language.count("a") < 35


@pytest.mark.parametrize("normalization", ["nfkc", "identity"])
def test_symbols_of_a_user_stay_whole(normalization):
    """Through the tokenizer of a SavedModel too."""
    symbols = ("<ph1>", "⟦x⟧", "<blank>")
    model = train_vocabulary(TEXTS, 440, "source_vocab_size", normalization, symbols)
    vocabulary, graph = Vocabulary(model), tokenizer(model)
    assert vocabulary.size == 440
    for text in ("the house<ph1>by the river", "<ph1> ⟦x⟧<blank> у реки", "(<ph1>)", "<ph1><ph1>"):
        ids = vocabulary.Encode(text)
        pieces = vocabulary.Pieces(ids)
        for symbol in symbols:
            assert pieces.count(symbol) == text.count(symbol), (text, pieces)
        assert vocabulary.Decode(ids) == text
        assert graph.detokenize(graph.tokenize([text])).numpy() == [text.encode()]
    for wrong in ("a b", " ", "ﬁ"):
        with pytest.raises(DataError, match=r"--user_symbols: .* must have no blanks"):
            check_symbols([wrong])


def test_symbols_make_another_vocabulary_in_the_cache(tmp_path):
    (tmp_path / "de.tsv").write_text("".join(f"{text}\t{text}\n" for text in TEXTS))
    found = scan(tmp_path)
    options = VocabOptions(440, 440)
    names = {_file_name(found, o, "source") for o in (options, replace(options, symbols=("<a>",)))}
    assert len(names) == 2
