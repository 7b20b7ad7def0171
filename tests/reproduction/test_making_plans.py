"""Making the plans of the page on reproduction, without compiling any."""

from pathlib import Path
from typing import Any

import pytest

from lingvo_moe.core.planner import slices
from lingvo_moe.reproduction import making, requests
from lingvo_moe.reproduction.requests import Wanted


def test_a_plan_is_made_in_a_process_of_its_own(tmp_path: Path, capfd: Any) -> None:
    assert making.in_own_process("three", Path.write_text, "[3]") == [3]
    with pytest.raises(making.MakingFailed, match="three: ended with status 1"):
        making.in_own_process("three", Path.read_text)
    assert "No such file" in capfd.readouterr().err


@pytest.mark.parametrize(
    "model, sizes",
    [
        ("mt.M4MoE128E12L", ["v5p:2x2x1", "v5p:4x4x8"]),  # 512 devices are more than the experts
        ("mt.T96L", ["v5p:4x4x8", "v5p:8x8x8"]),  # heads are cut over 8 devices
    ],
)
def test_slices_that_a_model_does_not_divide_over_are_passed_by(
    model: str, sizes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ["v5p:2x2x1", "v5p:4x4x8", "v5p:8x8x8"]
    monkeypatch.setattr(slices, "slices", lambda _: iter(known))
    assert list(making.divisible_slices(Wanted(model, "v5p"))) == sizes


def test_a_model_that_no_slice_holds_is_recorded_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "slices", lambda _: iter(["v6e:2x2", "v6e:4x4"]))
    wanted = Wanted("mt.M4MoE2048E36L", "v6e", requests.BF16)
    said: list[str] = []
    plan = making.make_plan(wanted, None, said.append)
    assert plan["fits_none"] == ["v6e:2x2", "v6e:4x4"]
    assert not said  # nothing was compiled
