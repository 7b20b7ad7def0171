import json
from pathlib import Path

import pytest
from damage import full_disk

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.records import (
    _OPEN_SHARDS,
    Records,
    cached_records,
    write_contents,
)
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.scan import Scan, scan
from lingvo_moe.tasks.text.data.shards import LanguageShards, lengths_file
from lingvo_moe.tasks.text.vocabulary.vocab_cache import VocabOptions, cached_vocabularies


@pytest.fixture(scope="module")
def found(data_dir: Path) -> Scan:
    return scan(data_dir)


@pytest.fixture(scope="module")
def vocabs(found: Scan, cache_dir: Path) -> NestedMap:
    return cached_vocabularies(found, VocabOptions(400, 300), cache_dir)


def test_made_once_and_keyed_by_vocabulary(found, vocabs, tmp_path):
    said: list[str] = []
    first = cached_records(found, vocabs, tmp_path, said.append)
    assert len(said) == 3
    cached_records(found, vocabs, tmp_path, said.append)
    assert len(said) == 3
    other = NestedMap(source=vocabs.target, target=vocabs.target)
    assert cached_records(found, other, tmp_path, said.append).key != first.key
    assert len(said) == 6


def test_a_flipped_bit_is_an_error_that_says_what_to_do(found, vocabs, tmp_path):
    records = cached_records(found, vocabs, tmp_path)
    path = records.directory / "aa-00000.array_record"
    data = bytearray(path.read_bytes())
    for at in range(500, 20_000, 400):
        data[at] ^= 0xFF
    path.write_bytes(bytes(data))
    damaged = Records(records.directory, records.key)
    message = r"aa-00000\.array_record: record \d+ is damaged .*; start again"
    with pytest.raises(DataError, match=message):
        [damaged.Read(0, position) for position in range(300)]


def test_a_full_disk_names_the_shard_and_leaves_nothing(found, vocabs, tmp_path):
    message = r"\[Errno 27\] File too large: '.*/shards-[0-9a-f]+/aa-00000\.array_record'"
    with full_disk(2000), pytest.raises(OSError, match=message):
        cached_records(found, vocabs, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert cached_records(found, vocabs, tmp_path).languages["aa"] == 300


def test_wide_vocabularies_use_wide_ids(found, vocabs, tmp_path):
    class Wide:
        size = 70_000
        model_bytes = b"wide"

        def EncodeBatch(self, texts):
            return [[69_999, len(text)] for text in texts]

    records = cached_records(found, NestedMap(source=Wide(), target=vocabs.target), tmp_path)
    assert records.Read(0, 0)[0][0] == 69_999
    assert json.loads((records.directory / "manifest.json").read_text())["dtype"] == "<u4"


def test_shards_hold_the_same_and_few_are_open(found, vocabs, tmp_path):
    whole = cached_records(found, vocabs, tmp_path / "whole")
    records = cached_records(found, vocabs, tmp_path / "shards", pairs_per_shard=7)
    assert records.languages == whole.languages
    assert records.shards == {"aa": [7] * 42 + [6], "bb": [7] * 8 + [4], "cc": [7]}
    assert sorted(p.name for p in records.directory.glob("bb-*"))[-1] == "bb-00008.array_record"
    for position in (*range(300), 3, 299, 0):
        for ours, theirs in zip(records.Read(0, position), whole.Read(0, position)):
            assert (ours == theirs).all()
    assert len(records._open[0]) == _OPEN_SHARDS
    # The order depends on such shards, so positions saved for others are not taken.
    assert records.key != whole.key
    assert cached_records(found, vocabs, tmp_path / "large", pairs_per_shard=100).key == whole.key


def test_lengths_lie_beside_the_records(found, vocabs, tmp_path, caplog):
    records = cached_records(found, vocabs, tmp_path, pairs_per_shard=100)
    needed = [[len(side) for side in records.Read(0, position)] for position in range(300)]
    assert records.Lengths(0).tolist() == needed
    path = lengths_file(records.directory, "aa")
    # Those of an earlier version have none: all records are read.
    written = path.read_bytes()
    path.unlink()
    assert not caplog.messages
    assert Records(records.directory, records.key).Lengths(0).tolist() == needed
    assert "without lengths: each start reads all records" in caplog.text
    path.write_bytes(written[:-4])
    with pytest.raises(DataError, match=r"aa\.lengths: missing or cut short, expected 1200 bytes"):
        Records(records.directory, records.key)
    path.write_bytes(written[:2] + b"\1\1" + written[4:])  # after the list of files was verified
    with pytest.raises(DataError, match=r"aa-00000\.array_record: record 0 is damaged .*; start"):
        Records(records.directory, records.key).Read(0, 0)


def test_an_error_says_why_nothing_is_left(tmp_path):
    dropped = {"too_long": 2, "empty_after_tokenising": 1}
    with pytest.raises(DataError, match="1 have no token on a side, 2 more than 65,535"):
        write_contents(tmp_path, "key", NestedMap(), {"de": LanguageShards(dropped=dropped)})
