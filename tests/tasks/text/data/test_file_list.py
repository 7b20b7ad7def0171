"""The data directories whose files are listed, and so verified before they are read."""

import pytest

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.file_list import FileList


@pytest.mark.parametrize("content", ["", "[]", "{", '{"list": 5}', "\xff", "[" * 200_000])
def test_a_corpus_json_that_names_no_list_asks_for_none(tmp_path, content):
    (tmp_path / "corpus.json").write_text(content)
    assert FileList.Open(tmp_path) is None


def test_a_corpus_json_that_names_its_list_needs_it(tmp_path):
    (tmp_path / "corpus.json").write_text('{"list": "corpus.sha256"}')
    with pytest.raises(DataError, match=r"corpus\.sha256"):
        FileList.Open(tmp_path)
