"""Held-out pairs that the user gives: which training pairs they exclude, and reports about unusable lines."""

import dataclasses
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.preparing.filters import Rules
from lingvo_moe.tasks.text.preparing.lines import Fields, Source
from lingvo_moe.tasks.text.preparing.prepare import PrepareOptions, prepare
from lingvo_moe.tasks.text.preparing.read_stage import GivenHeldOut, ReadJob, read_stage
from lingvo_moe.tasks.text.vocabulary.vocab_cache import VocabOptions


def _tsv(path: Path, *lines: str) -> Source:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Source("tsv", str(path), "de")


def test_a_sentence_is_kept_out_however_it_is_spelt(tmp_path):
    spelt = (
        unicodedata.normalize("NFD", "the café is naïve today"),
        "the soft\u00adware is run\u200bning",
        "One more sentence, here!",
    )
    given = GivenHeldOut()
    given.Read(_tsv(tmp_path / "dev.tsv", *(f"eins\t{text}" for text in spelt)), Fields())
    assert given.sources.keys() == {"de"} and not given.warnings
    keys = tmp_path / "keys"
    np.array(sorted(given.hashes), np.uint64).tofile(keys)
    plain = ("the café is naïve today", "the software is running", "one more sentence here")
    lines = [f"Satz {i}\t{text}" for i, text in enumerate((*plain, "not held out"))]
    source = _tsv(tmp_path / "de.tsv", *lines)
    made = read_stage(
        ReadJob(source, Fields(), Rules(), 0.0, str(keys), str(tmp_path / "read")), lambda n: None
    )
    assert (Path(made) / "de.tsv").read_text("utf-8") == "Satz 3\tnot held out\n"


def test_lines_of_no_use(tmp_path):
    given = GivenHeldOut()
    given.Read(_tsv(tmp_path / "some.tsv", "eins\tone", "no tab", "\tempty"), Fields())
    assert len(given.hashes) == 1
    assert given.warnings == [
        f"{tmp_path}/some.tsv:2: a TSV line with too few columns",
        f"{tmp_path}/some.tsv:3: a side without text",
    ]
    with pytest.raises(DataError, match=r"none.tsv: no line can be used: 2 x a TSV line with too"):
        GivenHeldOut().Read(_tsv(tmp_path / "none.tsv", "no tab", "nor here"), Fields())


def test_an_empty_file_is_refused(tmp_path):
    source = _tsv(tmp_path / "de.tsv")
    job = ReadJob(source, Fields(), Rules(), 0.0, None, str(tmp_path / "read"))
    for read in (
        lambda: read_stage(job, lambda n: None),
        lambda: GivenHeldOut().Read(source, Fields()),
    ):
        with pytest.raises(DataError, match=r"de\.tsv: no line can be used: it is empty"):
            read()


def test_pairs_that_no_reader_would_take_are_counted(tmp_path):
    """Each side is a line that can be read, both together are not."""
    (tmp_path / "x.de").write_text(f"{'ä' * 6000}\n{'ä' * 10}\n", encoding="utf-8")
    (tmp_path / "x.en").write_text(f"{'a ' * 5000}\naaaaaaa\n", encoding="utf-8")
    source = Source("lines", str(tmp_path / "x.de"), "de", str(tmp_path / "x.en"))
    job = ReadJob(source, Fields(), Rules(max_chars=20_000), 0.0, None, str(tmp_path / "read"))
    made = Path(read_stage(job, lambda n: None))
    assert '"dropped": {"too_long_line": 1}' in (made / "summary.json").read_text()
    assert len((made / "de.tsv").read_bytes().splitlines()) == 1
    for side in ("x.de", "x.en"):  # the first line alone
        (tmp_path / side).write_bytes((tmp_path / side).read_bytes().splitlines(True)[0])
    nothing = dataclasses.replace(job, output=str(tmp_path / "none"))
    with pytest.raises(
        DataError, match=r"no line can be used: 1 x a line of more .*x\.de:1: a line of"
    ):
        read_stage(nothing, lambda n: None)


def test_a_share_of_inputs_with_held_out_pairs_is_refused(tmp_path):
    (tmp_path / "texts" / "dev").mkdir(parents=True)
    for name in ("texts/de.tsv", "texts/dev/de.tsv"):
        _tsv(tmp_path / name, "eins\tone")
    options = PrepareOptions(VocabOptions(300, 300), dev_share=0.1)
    with pytest.raises(DataError, match=r"^--dev_share=0\.1: has no effect, since an input has"):
        prepare([tmp_path / "texts"], tmp_path / "data", options)
    assert not (tmp_path / "data").exists()
