"""Held-out pairs in batches: each once, a batch of one group, the first batches as mixed as all."""

from collections import Counter

import numpy as np
import pytest

from lingvo_moe.core.input.input_errors import NoHeldOutError
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.text.batches.held_out_batches import encoded, held_out_batches
from lingvo_moe.tasks.text.batches.rows_of_pairs import Shape
from lingvo_moe.tasks.text.data.errors import DataError

_SHAPE = Shape(rows=2, source_length=6, target_length=6, task_ids=True)


def _pairs(first: int, count: int, length: int = 2) -> list[tuple[str, str]]:
    """Pairs of ids as text: each pair is the same number, `length` times."""
    texts = [" ".join([str(first + i)] * length) for i in range(count)]
    return [(text, text) for text in texts]


def _encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _batches(groups, truncate=False, shape=_SHAPE):
    return list(held_out_batches(groups, encoded((_encode, _encode), shape, truncate), shape))


def _ids(batch) -> list[int]:
    """The number of each pair of a batch, which both sides have."""
    found = []
    for row in range(len(batch.src.ids)):
        for segment in range(1, batch.src.segment_ids[row].max() + 1):
            (number,) = set(batch.src.ids[row][batch.src.segment_ids[row] == segment][:-1].tolist())
            labels = batch.tgt.labels[row][batch.tgt.segment_ids[row] == segment]
            assert set(labels[:-1].tolist()) == {number}
            found.append(number)
    return found


def test_every_pair_once_in_batches_of_one_group_that_take_turns():
    groups = {
        "high": [(_pairs(100, 9), (0,)), (_pairs(200, 3), (1,))],
        "mid": [],
        "low": [(_pairs(300, 6), (2,))],
    }
    batches = _batches(groups)
    found = [(one.group, _ids(one.batch)) for one in batches]
    everything = [number for _, numbers in found for number in numbers]
    assert sorted(everything) == [*range(100, 109), *range(200, 203), *range(300, 306)]
    for group, numbers in found:
        assert all((number < 300) == (group == "high") for number in numbers)
    # In proportion to their pairs: twice as many are high as low, three of four of these of one language.
    assert Counter(group for group, _ in found[:3]) == {"high": 2, "low": 1}
    assert sum(number < 200 for number in found[0][1] + found[2][1]) == 6
    tasks = {int(t) for one in batches for t in np.unique(one.batch.src.task_ids)}
    assert tasks == {0, 1, 2}
    for first, again in zip(batches, _batches(groups), strict=True):
        for a, b in first.batch.Zip(again.batch):
            np.testing.assert_array_equal(a, b)


def test_pairs_longer_than_a_row_as_in_training():
    pairs = [*_pairs(5, 1, length=6), *_pairs(6, 1, length=5), ("", "7")]
    assert [_ids(one.batch) for one in _batches({"high": [(pairs, (0,))]})] == [[6]]
    (truncated,) = _batches({"high": [(pairs, (0,))]}, truncate=True)
    assert sorted(_ids(truncated.batch)) == [5, 6]
    assert _batches({"high": [(_pairs(5, 3, length=9), (0,))]}) == []


def test_the_pairs_of_the_languages_that_are_trained_on(tmp_path):
    for lang, lines in (("aa", 300), ("bb", 200), ("cc", 100)):
        texts = (f"{lang} one two {i}\tthree four {i * i} more {i}" for i in range(lines))
        pairs = "".join(f"{text}\n" for text in texts)
        (tmp_path / f"{lang}.tsv").write_text(pairs)
    sizes = {"source_vocab_size": 280, "target_vocab_size": 280}
    made = MtInput.Params().Set(
        data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"), batch_size=4, **sizes
    )
    inputs = made.Set(languages=["aa", "bb"]).Instantiate().Prepare()
    with pytest.raises(NoHeldOutError, match="has no dev directory; put held-out pairs into"):
        inputs.HeldOut()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "cc.tsv").write_text("cc one\tthree\n")
    with pytest.raises(NoHeldOutError, match="dev has pairs of cc, but of none of the languages"):
        inputs.HeldOut()
    for lang in ("aa", "bb"):
        (tmp_path / "dev" / f"{lang}.tsv").write_text(f"{lang} one two\tthree\n")
    batches = list(inputs.HeldOut())
    assert [one.group for one in batches] == ["high", "mid"]
    specs = inputs.BatchSpec()
    for one in batches:
        texts = inputs.vocabs.target.Decode(one.batch.tgt.labels[0])
        assert texts == "three"
        for path, spec in specs.FlattenItems():
            array = one.batch.GetItem(path)
            assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
    (tmp_path / "dev" / "aa.tsv").write_text("no tab\n")
    with pytest.raises(DataError, match="no good line"):
        inputs.HeldOut()
