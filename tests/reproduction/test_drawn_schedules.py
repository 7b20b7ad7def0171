"""The picture of the schedules has them all, and the committed one is of the same text."""

from lingvo_moe.reproduction import schedules
from tools.import_graph import ROOT


def test_the_committed_picture_has_all_schedules():
    text = schedules.draw().decode()
    assert text.startswith("<?xml") and text.rstrip().endswith("</svg>")
    for title, _, _ in schedules.DRAWN:
        assert f"<!-- {title} -->" in text or f">{title}<" in text
    committed = (ROOT / "docs" / "images" / "pipelines.svg").read_text("utf-8")
    assert committed.count("</text>") == text.count("</text>")
