import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from lingvo_moe.core.files import (
    append,
    atomic_file,
    clear_leftovers,
    naming,
    replaced_directory,
    write_atomic,
)


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_permissions_are_the_umask_s(tmp_path: Path, umask: int) -> None:
    write_atomic(tmp_path / "file", b"x")
    with replaced_directory(tmp_path / "directory") as directory:
        (directory / "inside").write_bytes(b"y")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "directory").stat().st_mode & 0o777 == 0o777 & ~umask


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"older")
    with contextlib.suppress(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["file"]
    with atomic_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"older"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_is_there_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    (path / "older").write_bytes(b"")
    removed = []

    def remove(directory: Path, **_: object) -> None:
        assert os.listdir(path) == ["newer"]  # whatever takes its time now
        removed.append(directory)

    monkeypatch.setattr("shutil.rmtree", remove)
    with replaced_directory(path) as directory:
        (directory / "newer").write_bytes(b"")
        assert os.listdir(path) == ["older"]
    assert os.listdir(removed[-1]) == ["older"]
    monkeypatch.undo()

    def refuse(self: Path, target: Path) -> None:
        if target == path and "newest" in os.listdir(self):
            raise OSError("no room")
        os.rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no room"), replaced_directory(path) as directory:
        (directory / "newest").write_bytes(b"")
    assert os.listdir(path) == ["newer"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_atomic(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"x"


def test_leftovers_are_cleared(tmp_path: Path) -> None:
    names = [
        ".data.0123456789ab",
        ".data.0123456789ab.txt",
        ".data.x",
        ".other.0123456789ab",
        "data",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / ".data.ba9876543210").write_bytes(b"half a file")
    clear_leftovers(tmp_path / "data")
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])


def test_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    append(path, b"first\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, before[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            append(path, b"second\n")
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            write_atomic(path, b"x" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"first\n" and os.listdir(tmp_path) == ["file"]
    append(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_errors_that_have_a_name_keep_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none/file"):
        append(tmp_path / "none/file", b"")
    with pytest.raises(OSError, match="of another kind"), naming(tmp_path):
        raise OSError("of another kind")
