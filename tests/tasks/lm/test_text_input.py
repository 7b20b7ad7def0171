"""Rows of packed text, from the data of a translation task and from files of texts."""

import gzip
import itertools
import json
import logging

import numpy as np
import pytest
from trainer_testing import write_corpus

from lingvo_moe.core.config import registry
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.vocabulary.special_ids import BOS_ID, EOS_ID


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("lm") / "data", held_out=20)


@pytest.fixture(scope="module")
def inputs(data_dir):
    params = registry.GetParams("lm.Tiny").input
    params.Set(data_dir=str(data_dir), cache_dir=str(data_dir.parent / "cache"), too_long="drop")
    return params.Instantiate().Prepare()


def _texts(batch, vocabulary):
    """The texts of a batch, checked against their labels."""
    found = []
    for row in range(len(batch.ids)):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            mine = batch.segment_ids[row] == segment
            ids, labels = batch.ids[row][mine], batch.labels[row][mine]
            assert ids[0] == BOS_ID and labels[-1] == EOS_ID
            np.testing.assert_array_equal(ids[1:], labels[:-1])
            np.testing.assert_array_equal(batch.segment_pos[row][mine], np.arange(len(ids)))
            found.append(vocabulary.Decode(labels[:-1].tolist()))
    return found


def test_rows_are_the_target_sides_packed(inputs, data_dir):
    lines = [line for path in data_dir.glob("*.tsv") for line in path.read_text().splitlines()]
    english = {line.split("\t")[1] for line in lines}
    batch = next(iter(inputs))
    for name, spec in inputs.BatchSpec().FlattenItems():
        assert batch[name].shape == spec.shape == (8, 24) and batch[name].dtype == spec.dtype
    texts = _texts(batch, inputs.vocabs.target)
    assert len(texts) > 8  # some rows hold several
    assert set(texts) <= english


def test_pairs_need_no_vocabulary_of_their_sources(inputs, data_dir):
    assert inputs.vocabs.source is inputs.vocabs.target
    made = [path.name for path in (data_dir.parent / "cache").glob("*.model")]
    assert [name.partition("-")[0] for name in made] == ["target"]
    assert inputs.records.Read(0, 0)[0].size == 0  # nor records of them
    message = r"input\.source_vocab_size=300: has no effect with input\.cls=LmInput"
    with pytest.raises(registry.RegistryError, match=message):
        registry.GetParams("lm.Tiny", "input.source_vocab_size=300")


def test_rows_of_two_processes_are_those_of_one(inputs):
    whole, parts = iter(inputs), [iter(inputs), iter(inputs)]
    parts[0].rows, parts[1].rows = range(3), range(3, 8)
    for _ in range(5):
        batch, (first, second) = next(whole), map(next, parts)
        for name, array in batch.items():
            np.testing.assert_array_equal(
                array, np.concatenate([first[name][:3], second[name][3:]])
            )
        assert not first.ids[3:].any()  # nothing is read for the others


def test_held_out_texts_come_once_each(inputs, data_dir):
    lines = [
        line
        for name in ("aa", "bb")
        for line in (data_dir / "dev" / f"{name}.tsv").read_text().splitlines()
    ]
    want = sorted(line.split("\t")[1] for line in lines)
    long = inputs.p.Copy().Set(target_length=64).Instantiate()
    found = [t for held in long.HeldOut() for t in _texts(held.batch, long.vocabs.target)]
    assert sorted(found) == want


def test_texts_longer_than_a_row_are_counted_on_the_target_side_alone(inputs, monkeypatch):
    params = inputs.p.Copy().Set(target_length=8)
    short = params.Instantiate()
    lines = []
    short.Prepare(lines.append)
    targets = [
        len(short.records.Read(i, n)[1]) + 1
        for i, number in enumerate(short.languages.values())
        for n in range(number)
    ]
    lost = sum(length > 8 for length in targets)
    assert 0 < lost < len(targets)
    assert f"{lost:,} ({lost / len(targets):.1%}) are longer than a row and left out" in lines[-1]
    assert f"{sum(short.languages.values()):,} texts of {len(short.languages)} files" in lines[-1]
    (warning,) = short.Warnings()
    assert "input.target_length=8" in warning and "source_length" not in warning
    assert "of the texts are longer than a row" in warning
    monkeypatch.setattr("lingvo_moe.tasks.text.batches.packed_input._GIVE_UP_AFTER", 1)
    with pytest.raises(
        DataError, match=r"^none of 1 texts fits into a row of input\.target_length=2; make"
    ):
        next(iter(params.Copy().Set(target_length=2).Instantiate()))


def test_a_vocabulary_that_is_too_large_names_the_model_s_parameter(inputs):
    params = inputs.p.Copy().Set(target_vocab_size=20_000)
    with pytest.raises(DataError, match=r"input.target_vocab_size=\d+;task.vocab_size=\d+'"):
        params.Instantiate().Prepare()


LONG = "  one " + "two\nthree 🙂 " * 30


@pytest.fixture
def texts(tmp_path):
    """Input of files of texts, of which a few are longer than a row."""
    data = tmp_path / "data"
    (data / "dev").mkdir(parents=True)
    objects = [{"id": "x", "body": text} for text in (LONG, "a \ud800 b", *map(str, range(300)))]
    lines = [json.dumps(item) for item in objects]
    (data / "web.jsonl").write_text(
        "\n".join([*lines, "{", '{"text": "no", "body": 1}', '{"body": " "}'])
    )
    with gzip.open(data / "books.txt.gz", "wt") as file:
        file.write("\n".join(f"line {n} " + "word " * (n % 60) for n in range(200)))
    (data / "dev" / "web.jsonl").write_text(lines[0])
    params = registry.GetParams("lm.Tiny").input
    params.Set(data_dir=str(data), cache_dir=str(tmp_path / "cache"), text_field="body")
    return params.Set(target_vocab_size=290)


def test_files_of_texts_are_read_whole_in_parts_of_a_row(texts, caplog):
    with caplog.at_level(logging.WARNING):
        inputs = texts.Instantiate().Prepare()
    assert inputs.languages == {"books": 200, "web": 302}
    assert "web.jsonl:303: skipped: no json: a line must be an object" in caplog.text
    assert "no text: no string in field 'body'; strings are in 'text'" in caplog.text
    assert inputs.vocabs.source is inputs.vocabs.target
    whole = [BOS_ID, *inputs.vocabs.target.Encode(LONG.strip()), EOS_ID]
    parts = [tuple(whole[at : at + 25]) for at in range(0, len(whole) - 1, 24)]
    assert len(parts) > 8 and inputs.vocabs.target.Decode(whole[1:]) == LONG.strip()
    assert sorted(_parts(held.batch for held in inputs.HeldOut())) == sorted(parts)
    assert set(parts) <= set(_parts(itertools.islice(inputs, 400)))


def _parts(batches):
    """The ids of each segment, and its last label."""
    found = []
    for batch in batches:
        for row, segments in enumerate(batch.segment_ids):
            for segment in range(1, segments.max() + 1):
                ids, labels = (
                    batch.ids[row][segments == segment],
                    batch.labels[row][segments == segment],
                )
                assert ids[1:].tolist() == labels[:-1].tolist()
                found.append((*ids.tolist(), labels[-1]))
    return found


def test_a_stream_of_parts_goes_on_where_it_stopped(texts):
    inputs = texts.Instantiate().Prepare()
    stream = iter(inputs)
    for _ in range(3):
        next(stream)
    again = iter(inputs)
    again.SetState(json.loads(json.dumps(stream.GetState())))
    for _ in range(3):
        want, found = next(stream), next(again)
        assert all(np.array_equal(array, found[name]) for name, array in want.items())
    other = iter(texts.Copy().Set(target_length=16).Instantiate().Prepare())
    with pytest.raises(DataError, match=r"is of other data.*target_length"):
        other.SetState(stream.GetState())


def test_a_field_that_no_line_has_is_named(texts):
    with pytest.raises(DataError, match=r"no texts.*malformed.*a string in the field 'nope'"):
        texts.Copy().Set(text_field="nope", languages=["web"]).Instantiate().Prepare()
