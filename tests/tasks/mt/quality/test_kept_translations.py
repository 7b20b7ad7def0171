"""Stored translations: damaged ones are made again."""

import pytest

from lingvo_moe.tasks.mt.quality.kept_translations import KeptTranslations


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff"])
def test_what_is_damaged_is_translated_again(tmp_path, damage):
    calls = []

    def shout(lines, langs):
        calls.append(lines)
        return [line.upper() for line in lines]

    def kept() -> KeptTranslations:
        return KeptTranslations(shout, tmp_path, {"step": 3})

    lines = (["a", "b"], ["de", "sw"])
    assert kept()(*lines) == kept()(*lines) == ["A", "B"]
    assert len(calls) == 1
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert kept()(*lines) == ["A", "B"]
    again = kept()
    assert again(*lines) == ["A", "B"] and (again.reused, again.translated) == (2, 0)
    assert len(calls) == 2
