"""Compiled programs on disk: the key has program, names, machine and compiler; a damaged file means compiling again."""

import pytest

from lingvo_moe.analysis.programs.aot.aot import AotResult
from lingvo_moe.analysis.programs.aot.aot_cache import cached, default_cache_dir


class _Program:
    hash = "0123456789abcdef" * 4

    def __init__(self, names="76543210" * 8):
        self.names_hash = names


def _result(text="HloModule m"):
    return AotResult(
        hlo_text=text,
        memory={"arguments": 1},
        cost={"flops": 2.0},
        compile_seconds=3.0,
        host_peak_bytes=4,
    )


def _never():
    raise AssertionError("compiled again")


def test_an_entry_is_read_back_for_the_same_program_machine_and_compiler(tmp_path):
    cache = tmp_path / "new"
    assert cached(_Program(), "v3:2x2", "libtpu-1", cache, _result) == _result()
    assert cached(_Program(), "v3:2x2", "libtpu-1", cache, _never) == _result()
    other = _result("HloModule other")
    assert cached(_Program(), "v3:4x4", "libtpu-1", cache, lambda: other) == other
    assert cached(_Program(), "v3:2x2", "libtpu-2", cache, lambda: other) == other
    # The same program with other names of operations, from which layers are derived.
    assert cached(_Program("0" * 64), "v3:2x2", "libtpu-1", cache, lambda: other) == other
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", [b"", b"\x1f\x8b no", "half"])
def test_a_damaged_entry_is_made_again(tmp_path, damage):
    cached(_Program(), "v3:2x2", "c", tmp_path, _result)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2] if damage == "half" else damage)
    again = _result("HloModule again")
    assert cached(_Program(), "v3:2x2", "c", tmp_path, lambda: again) == again
    assert cached(_Program(), "v3:2x2", "c", tmp_path, _never) == again


def test_without_a_directory_nothing_is_kept_and_what_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lingvo_moe" / "plans"
    assert cached(_Program(), "v3:2x2", "c", None, _result) == _result()
    with pytest.raises(AssertionError):
        cached(_Program(), "v3:2x2", "c", tmp_path / "cache", _never)
    assert list(tmp_path.iterdir()) == []
