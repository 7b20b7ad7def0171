"""python -m tools.draw_schedules: every stage works once on every micro-batch, in an order that data allow."""

import pytest

from lingvo_moe.core.pipeline.schedule import BACKWARD, FORWARD, WEIGHTS, make_schedule
from tools import draw_schedules
from tools.import_graph import ROOT


@pytest.mark.parametrize(("_", "name", "repeats"), draw_schedules.DRAWN)
def test_every_stage_works_on_every_micro_batch_and_the_bubble_is_the_law_s(_, name, repeats):
    K, M = draw_schedules.STAGES, draw_schedules.MICRO_BATCHES
    cells = draw_schedules.cells_of(make_schedule(name, K, M, repeats))
    kinds = [FORWARD, BACKWARD] + [WEIGHTS] * (name == "zb_h1")
    done: dict[tuple[str, int], list[int]] = {(kind, k): [] for kind in kinds for k in range(K)}
    idle = dict.fromkeys(done, 0)
    for cell in cells:
        if cell.micro_batch is None:
            idle[cell.kind, cell.stage] += 1
        else:
            done[cell.kind, cell.stage].append(cell.micro_batch)
    for (kind, stage), found in done.items():
        assert sorted(found) == sorted(list(range(M)) * repeats), (kind, stage)
        assert idle[kind, stage] == (0 if kind == WEIGHTS else K - 1)


@pytest.mark.parametrize(("_", "name", "repeats"), draw_schedules.DRAWN)
def test_a_micro_batch_passes_the_stages_in_order_forward_and_backward(_, name, repeats):
    K, M = draw_schedules.STAGES, draw_schedules.MICRO_BATCHES
    cells = draw_schedules.cells_of(make_schedule(name, K, M, repeats))
    for m in range(M):
        mine = [cell for cell in cells if cell.micro_batch == m]
        forward = [c.stage for c in mine if c.kind == FORWARD]
        backward = [c.stage for c in mine if c.kind == BACKWARD]
        assert forward == list(range(K)) * repeats
        assert backward == list(reversed(range(K))) * repeats
        last = max(c.column for c in mine if c.kind == FORWARD)
        assert all(c.column > last for c in mine if c.kind != FORWARD)


def test_the_committed_picture_has_all_schedules(tmp_path):
    path = tmp_path / "pipelines.svg"
    assert draw_schedules.main([f"--output={path}"]) == 0
    text = path.read_text("utf-8")
    assert text.startswith("<?xml") and text.rstrip().endswith("</svg>")
    for title, _, _ in draw_schedules.DRAWN:
        assert f"<!-- {title} -->" in text or f">{title}<" in text
    committed = (ROOT / "docs" / "images" / "pipelines.svg").read_text("utf-8")
    assert committed.count("</text>") == text.count("</text>")
