import gzip
import random

import pytest
import zstandard

from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.opening import read_lines
from lingvo_moe.tasks.text.data.scan import scan

TEXT = "".join(f"zeile {i}\tline {i} {random.Random(i).random()}\n" for i in range(20_000))


def _zst(text: str, frames: int = 1) -> bytes:
    data, step = text.encode(), len(text) // frames + 1
    parts = [data[i : i + step] for i in range(0, len(data), step)]
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)


@pytest.mark.parametrize("name", ["de.tsv", "de.tsv.gz", "de.tsv.zst", "many.zst"])
def test_the_lines_of_each_compression(tmp_path, name):
    made = {
        "de.tsv": TEXT.encode(),
        "de.tsv.gz": gzip.compress(TEXT.encode()),
        "de.tsv.zst": _zst(TEXT),
        "many.zst": _zst(TEXT, frames=7),
    }
    (tmp_path / name).write_bytes(made[name])
    lines = list(read_lines(tmp_path / name))
    assert [text for _, text, _ in lines] == TEXT.splitlines()
    assert lines[-1][0] == 20_000


def test_zstandard_files_are_training_data(tmp_path):
    (tmp_path / "de.tsv.zst").write_bytes(_zst("Haus\thouse\n"))
    assert list(tsv.read_pairs(scan(tmp_path).files["de"])) == [("Haus", "house")]


@pytest.mark.parametrize("name", ["de.tsv.gz", "de.tsv.zst"])
def test_a_file_cut_short_or_damaged_is_told_with_its_line(tmp_path, name):
    path = tmp_path / name
    whole = gzip.compress(TEXT.encode()) if name.endswith("gz") else _zst(TEXT)
    path.write_bytes(whole[: len(whole) // 2])
    message = rf"{name}:\d+: cannot be read, damaged or cut short: .*end"
    with pytest.raises(DataError, match=message):
        list(read_lines(path))
    path.write_bytes(whole[:5000] + bytes(100) + whole[5100:])
    with pytest.raises(DataError, match="damaged or cut short"):
        list(read_lines(path))
    path.write_bytes(b"no such thing")
    with pytest.raises(DataError, match="damaged or cut short"):
        list(read_lines(path))


def test_one_endless_line_is_one_bad_line(tmp_path):
    (tmp_path / "x.zst").write_bytes(_zst("ok\n" + "x" * 5_000_000 + "\nok\n"))
    assert list(read_lines(tmp_path / "x.zst")) == [
        (1, "ok", ""),
        (2, None, "too_long"),
        (3, "ok", ""),
    ]
