"""Making the plans of the reproduction page, without compiling any."""

from pathlib import Path
from typing import Any

import pytest

from lingvo_moe.planning import step_plan
from lingvo_moe.reproduction import making, requests
from lingvo_moe.reproduction.requests import Wanted


def test_a_plan_is_made_in_a_process_of_its_own(tmp_path: Path, capfd: Any) -> None:
    assert making.in_own_process("three", Path.write_text, "[3]") == [3]
    with pytest.raises(making.MakingFailed, match="three: ended with status 1"):
        making.in_own_process("three", Path.read_text)
    assert "No such file" in capfd.readouterr().err


def test_a_model_that_no_slice_holds_is_recorded_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plan, "machines", lambda _: iter(["v6e:2x2", "v6e:4x4"]))
    wanted = Wanted("mt.M4MoE2048E36L", "v6e", requests.BF16)
    said: list[str] = []
    plan = making.make_plan(wanted, None, said.append)
    assert plan["fits_none"] == []
    assert not said  # nothing was compiled
