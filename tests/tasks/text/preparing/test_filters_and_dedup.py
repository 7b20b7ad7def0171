import numpy as np
import pytest

from lingvo_moe.tasks.text.preparing.dedup import keep_first
from lingvo_moe.tasks.text.preparing.filters import REASONS, Rules
from lingvo_moe.tasks.text.preparing.read_stage import pair_hash


@pytest.mark.parametrize("lang, source, target, reason", [
    ("de", "Haus", "house", ""),
    ("de", "", "house", "empty"),
    ("de", "123", "house", "no_letters"),
    ("de", "x" * 1001, "y" * 900, "too_long"),
    ("de", "a word", "a word " * 6, "length_ratio"),
    ("zh", "联合国", "the United Nations of", ""),
    ("zh", "联合国", "the United Nations " * 3, "length_ratio"),
    ("de", "a", "a b c d e f g h", ""),  # too short for a ratio
    ("de", "Windows NT", "windows nt", "equal_sides"),
    ("de", "Это по-русски", "this is Russian", "wrong_script"),
    ("el", "This is English", "and so is this", "wrong_script"),
    ("de", "das ist es", "это по-русски", "wrong_target_script"),
])  # fmt: skip
def test_why_a_pair_is_left_out(lang, source, target, reason):
    assert Rules().Reason(lang, source, target) == reason
    assert not reason or reason in REASONS


def test_rules_can_be_set():
    assert Rules(check_script=False).Reason("de", "Это", "this") == ""
    assert Rules(max_chars=3).Reason("de", "Haus", "hut") == "too_long"
    assert Rules(max_ratio=9).Reason("de", "a word", "a word " * 6) == ""
    assert Rules(target_lang="ru").Reason("en", "this", "Это") == ""


@pytest.mark.parametrize("at_once", [10_000, 700, 90])
def test_the_first_of_equal_hashes_stays(tmp_path, at_once):
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 2000, np.uint64)[rng.integers(0, 2000, 5000)]
    parts = [tmp_path / "a.hashes", tmp_path / "b.hashes"]
    hashes[:1234].tofile(parts[0])
    hashes[1234:].tofile(parts[1])
    work = tmp_path / "work"
    work.mkdir()
    keep = keep_first(parts, work, at_once)
    seen: set[int] = set()
    expected = [not (h in seen or seen.add(h)) for h in hashes.tolist()]
    assert keep.tolist() == expected
    assert [path.name for path in work.iterdir()] == ["keep"]


def test_pairs_that_differ_in_case_alone_are_equal(tmp_path):
    assert keep_first([], tmp_path).size == 0
    assert pair_hash("Haus", "House") == pair_hash("haus", "house")
    assert pair_hash("Haus", "house") != pair_hash("house", "Haus")
