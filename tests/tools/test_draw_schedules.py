"""python -m tools.draw_schedules: every stage works once on every micro-batch, in an order that data allow."""

from tools import draw_schedules
from tools.import_graph import ROOT


def test_the_committed_picture_has_all_schedules(tmp_path):
    path = tmp_path / "pipelines.svg"
    assert draw_schedules.main([f"--output={path}"]) == 0
    text = path.read_text("utf-8")
    assert text.startswith("<?xml") and text.rstrip().endswith("</svg>")
    for title, _, _ in draw_schedules.DRAWN:
        assert f"<!-- {title} -->" in text or f">{title}<" in text
    committed = (ROOT / "docs" / "images" / "pipelines.svg").read_text("utf-8")
    assert committed.count("</text>") == text.count("</text>")
