import gzip
from collections import Counter

import pytest

from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.dev_set import DevSet
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.opening import MAX_LINE_BYTES
from lingvo_moe.tasks.text.data.scan import scan

BAD = (
    b"good\tone\n"  # 1
    b"no tab here\n"  # 2
    b"\tempty source\n"  # 3
    b"empty english\t \n"  # 4
    b"bad \xff utf8\tx\n"  # 5
    + b"x"
    * (MAX_LINE_BYTES * 3)  # 6
    + b"\tlong\n"
    b" spaces \t two \tmore\tcolumns\r\n"  # 7
    b"\n"  # 8
    b"last\tthree"  # 9, without an end
)


@pytest.mark.parametrize("name", ["xx.tsv", "xx.tsv.gz"])
def test_bad_lines_are_skipped_counted_and_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(BAD) if name.endswith("gz") else BAD)
    counts = Counter[str]()
    told: list[str] = []
    pairs = list(tsv.read_pairs(path, counts, told.append))
    assert pairs == [("good", "one"), ("spaces", "two"), ("last", "three")]
    assert counts == Counter(good=3, no_tab=2, empty_side=2, invalid_utf8=1, too_long=1)
    where = [message.split(": ")[0] for message in told]
    assert where == [f"{path}:2", f"{path}:3", f"{path}:4", str(path)]
    assert told[-1].endswith(
        "skipped 6 of 9 lines (2 no tab, 2 empty side, 1 invalid utf8, 1 too long)"
    )


def test_scan_counts_and_fingerprints(tmp_path):
    (tmp_path / "de.tsv").write_text("a\tb\nbad\n")
    (tmp_path / "fr.tsv").write_text("")
    first = scan(tmp_path)
    assert first.pairs == {"de": 1}
    assert first.skipped == {"no_tab": 1}
    assert scan(tmp_path).fingerprint == first.fingerprint
    assert scan(tmp_path, ["de"]).fingerprint != first.fingerprint
    (tmp_path / "de.tsv").write_text("a\tc\nbad\n")
    assert scan(tmp_path).fingerprint != first.fingerprint
    with pytest.raises(DataError, match=r"no language 'da' \(known: de, fr\)"):
        scan(tmp_path, ["da"])


def test_files_that_are_not_trained_on_are_named(tmp_path, caplog):
    contents = {
        "de.tsv": "a\tb\n",
        "fr.tsv": "",
        "sw.tsv": "no tab\n",
        "mine.tsv.gz": "",
        "a.txt": "",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    layout = "expected files such as de.tsv.gz with lines of source<TAB>english"
    of_texts = ", or of texts alone: NAME.txt, NAME.jsonl, plain, .gz or .zst"
    empty = [
        f"{tmp_path}/fr.tsv: left out: it is empty",
        f"{tmp_path}/sw.tsv: left out: it has no good line",
    ]

    def warnings(field: str | None) -> list[str]:
        caplog.clear()
        assert scan(tmp_path, field=field).pairs == {"de": 1}
        return [message for message in caplog.messages if "skipped" not in message]

    assert warnings(None) == [
        f"{tmp_path}: these files are not read: mine.tsv.gz; {layout}",
        *empty,
    ]
    unread = f"{tmp_path}: these files are not read: a.txt, mine.tsv.gz; {layout}{of_texts}"
    assert warnings("text") == [unread, *empty]


def test_dev_set(data_dir, tmp_path):
    dev = DevSet(data_dir, max_per_language=3)
    assert dev.languages == ["aa", "bb", "cc"]
    found = dict(dev.items())
    assert {lang: len(pairs) for lang, pairs in found.items()} == dict.fromkeys(found, 3)
    assert found["aa"] == list(tsv.read_pairs(data_dir / "dev" / "aa.tsv.gz"))[:3]
    assert DevSet(data_dir, languages=["cc"]).languages == ["cc"]
    with pytest.raises(DataError, match="no language 'ac'"):
        DevSet(data_dir, languages=["ac"])
    (tmp_path / "de.tsv").write_text("a\tb\n")
    with pytest.raises(DataError, match="has no dev directory"):
        DevSet(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        DevSet(tmp_path / "nowhere")
    with pytest.raises(DataError, match=rf"give the directory that it is in, '{data_dir}'"):
        DevSet(data_dir / "dev")
