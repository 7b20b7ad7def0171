"""Rows of packed text from the data of a translation task."""

import numpy as np
import pytest
from trainer_testing import write_corpus

from lingvo_moe.core.config import registry
from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.input.special_ids import BOS_ID, EOS_ID


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    directory = write_corpus(tmp_path_factory.mktemp("lm") / "data")
    (directory / "dev").mkdir()
    for name in ("aa", "bb"):
        lines = (directory / f"{name}.tsv").read_text().splitlines()[:20]
        (directory / "dev" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture(scope="module")
def inputs(data_dir):
    params = registry.GetParams("lm.Tiny").input
    params.Set(data_dir=str(data_dir), cache_dir=str(data_dir.parent / "cache"))
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


def test_texts_longer_than_a_row_are_counted_on_the_target_side_alone(inputs):
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
    (warning,) = short.Warnings()
    assert "input.target_length=8" in warning and "source_length" not in warning


def test_a_vocabulary_that_is_too_large_names_the_model_s_parameter(inputs):
    params = inputs.p.Copy().Set(target_vocab_size=20_000)
    with pytest.raises(DataError, match=r"input.target_vocab_size=\d+;task.vocab_size=\d+'"):
        params.Instantiate().Prepare()
