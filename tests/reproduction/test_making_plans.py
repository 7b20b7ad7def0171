"""Making the plans of the reproduction page, without compiling any."""

from pathlib import Path

import pytest

from lingvo_moe.reproduction import making


def test_a_plan_is_made_in_a_process_of_its_own(tmp_path, capfd):
    assert making.in_own_process("three", Path.write_text, "[3]") == [3]
    with pytest.raises(making.MakingFailed, match="three: ended with status 1"):
        making.in_own_process("three", Path.read_text)
    assert "No such file" in capfd.readouterr().err
