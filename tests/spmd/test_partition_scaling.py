"""The benchmark of figure 2, for the fewest partitions that show which form grows."""

import contextlib
import io
import json

import pytest

from benchmarks import partition_scaling


@pytest.mark.slow
def test_two_and_four_partitions(tmp_path, capsys, monkeypatch):
    """One of the two programs; its form with TensorFlow in this process, which has loaded it."""
    monkeypatch.setattr(partition_scaling, "PROGRAMS", ("dot",))
    in_own_process = partition_scaling._in_own_process

    def measured(form, *args):
        if form == "mpmd":
            return in_own_process(form, *args)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            partition_scaling.measure(form, *args[:2])
        return json.loads(printed.getvalue())

    monkeypatch.setattr(partition_scaling, "_in_own_process", measured)
    output, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    arguments = ["--partitions=2,4", f"--output={output}", f"--plot={picture}", "--forms=spmd,mpmd"]
    assert partition_scaling.main(arguments) == 0
    entries = json.loads(output.read_text())["entries"]
    found = {(e["program"], e["form"], e["partitions"]): e["instructions"] for e in entries}
    assert len(found) == 4
    assert found["dot", "spmd", 2] == found["dot", "spmd", 4]
    assert found["dot", "mpmd", 4] == 2 * found["dot", "mpmd", 2]
    assert all(e["compile_seconds"] > 0 and e["trace_seconds"] > 0 for e in entries)
    assert "| dot | 4 |" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_takes_too_long_is_not_tried_for_more(monkeypatch):
    tried = []

    def measured(form, program, partitions, limit):
        tried.append((program, form, partitions))
        slow = form == "mpmd" and partitions > 2
        return None if slow else dict.fromkeys(partition_scaling._MEASURED, 1)

    monkeypatch.setattr(partition_scaling, "_in_own_process", measured)
    result = partition_scaling.run([2, 4, 8], ("spmd", "mpmd"), rounds=1, limit=7)
    assert ("dot", "mpmd", 4) in tried and ("dot", "mpmd", 8) not in tried
    assert ("dot", "spmd", 8) in tried
    assert "| dot | 4 | 1.00 | 1.00 | 1 | 0.0 | - | > 7 |" in partition_scaling.table(result)
