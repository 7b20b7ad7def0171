"""English names of language codes, in all spellings of corpora."""

import pytest

from lingvo_moe.tasks.mt.reports.language_names import english_name, name_and_code


@pytest.mark.parametrize("code, name", [
    ("de", "German"),
    ("dsb", "Lower Sorbian"),
    ("deu", "German"),  # ISO 639-3
    ("iw", "Hebrew"),  # of old
    ("zh_Hans", "Simplified Chinese"),
    ("pt-BR", "Brazilian Portuguese"),
    ("deu_Latn", "German (Latin)"),
    ("zh-TW", "Chinese (Taiwan)"),
    ("", ""),
    ("made up", ""),
    ("../x", ""),
])  # fmt: skip
def test_names(code, name):
    assert english_name(code) == name


def test_with_its_code():
    assert name_and_code("sw") == "Swahili, sw"
    assert name_and_code("qqq") == "qqq"
