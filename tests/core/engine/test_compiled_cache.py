"""Compiled programs are stored where only this user can write, and a damaged one never runs."""

import os
from pathlib import Path

import jax
import pytest

from lingvo_moe.core.engine import compiled_cache
from lingvo_moe.core.engine.compiled_cache import CheckedCache, enable_compilation_cache
from lingvo_moe.core.private import jax as private


@pytest.fixture(autouse=True)
def _settings_come_back(monkeypatch):
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_enable_xla_caches",
    )
    was = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield
    for name, value in was.items():
        jax.config.update(name, value)
    private.compilation_cache.reset_cache()


def test_an_entry_comes_back_until_a_bit_of_it_changes(tmp_path, capsys):
    cache = CheckedCache(tmp_path / "made")
    assert cache.get("key") is None
    cache.put("key", b"machine code")
    assert cache.get("key") == b"machine code"
    (file,) = (tmp_path / "made").iterdir()
    whole = file.read_bytes()
    for i in range(len(whole)):
        file.write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        assert cache.get("key") is None
        assert f"{file} was changed or damaged" in capsys.readouterr().err
        file.write_bytes(whole[:i])
        assert cache.get("key") is None
    cache.put("key", b"machine code")
    assert cache.get("key") == b"machine code"
    cache.put("other", b"other code")
    (tmp_path / "made" / "other.compiled").rename(file)
    assert cache.get("key") is None


def test_the_users_own_directory_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = enable_compilation_cache()
    made = tmp_path / "lingvo_moe" / "compiled"
    assert os.path.dirname(directory) == str(made)
    assert made.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == directory
    cache, _ = private.compilation_cache.get_file_cache(directory)
    assert isinstance(cache, CheckedCache)


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda path, patch: path.chmod(0o770), "others can write in"),
        (lambda path, patch: path.chmod(0o703), "others can write in"),
        (lambda path, patch: patch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1), "belongs to user"),
        (lambda path, patch: (path.rmdir(), path.touch()), "File exists"),
    ],
    ids=["group", "others", "owner", "a file"],
)  # fmt: skip
def test_a_directory_that_others_can_write_in_is_not_used(
    tmp_path, monkeypatch, capsys, change, why
):
    path = tmp_path / "shared"
    path.mkdir()
    change(path, monkeypatch)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(path))  # which JAX itself would use
    jax.config.update("jax_compilation_cache_dir", str(path))
    assert enable_compilation_cache() == ""
    assert jax.config.jax_compilation_cache_dir is None
    assert private.compilation_cache._get_cache(jax.devices()[0].client) is None
    err = capsys.readouterr().err
    assert err.startswith("compiled programs are not kept: ") and str(path) in err and why in err


def test_the_directory_of_a_kind_of_cpu_is_looked_at_too(tmp_path, capsys):
    directory = enable_compilation_cache(tmp_path / "cache")
    os.chmod(directory, 0o770)
    assert enable_compilation_cache(tmp_path / "cache") == ""
    assert f"others can write in {directory}" in capsys.readouterr().err


@pytest.mark.parametrize("name, value, why", [
    ("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache", "remote storage is not supported"),
    ("HOME", "", "home directory"),
])  # fmt: skip
def test_without_a_place_nothing_is_kept(monkeypatch, tmp_path, capsys, name, value, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if value:
        monkeypatch.setenv(name, value)
    else:  # a user without an entry in the list of users
        monkeypatch.setattr(Path, "home", _no_home)
    assert enable_compilation_cache() == ""
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path, monkeypatch):
    cache = CheckedCache(tmp_path)
    for i, key in enumerate("abc"):
        cache.put(key, b"x" * 100)
        os.utime(tmp_path / f"{key}.compiled", (i, i))
    assert cache.get("a")  # used just now
    left = tmp_path / ".d.compiled.0123456789ab"  # by a process that was killed
    left.write_bytes(b"x" * 100)
    os.utime(left, (0, 0))
    monkeypatch.setattr(compiled_cache, "_MOST_BYTES", 400)
    compiled_cache._make_room(tmp_path)
    assert sorted(p.name[0] for p in tmp_path.iterdir()) == ["a", "c"]
