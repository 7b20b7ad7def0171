import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from damage import full_disk

from lingvo_moe.core.files.files import (
    atomic_file,
    clear_leftovers,
    open_to_write,
    replaced_directory,
    reserve,
    write_atomic,
)


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_permissions_are_the_umask_s(tmp_path, umask):
    write_atomic(tmp_path / "file", b"x")
    with replaced_directory(tmp_path / "directory") as directory:
        (directory / "inside").write_bytes(b"y")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "directory").stat().st_mode & 0o777 == 0o777 & ~umask


def test_whole_or_not_at_all(tmp_path):
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


def test_a_directory_is_there_before_and_after(tmp_path, monkeypatch):
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


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_atomic(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"x"


def test_leftovers_are_cleared(tmp_path):
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


def _mapped(path: Path) -> None:
    reserve(path, 9000)


def _appended(path: Path) -> None:
    with open_to_write(path, "ab") as file:
        file.write(b"x" * 9000)


def _atomic(path: Path) -> None:
    write_atomic(path, b"x" * 9000)


def _array(path: Path) -> None:
    with atomic_file(path) as file:
        np.savez(file, a=np.arange(9000))


@pytest.mark.parametrize("write", [_atomic, _array, _appended, _mapped])
def test_a_full_disk_s_error_names_the_file(tmp_path, write):
    with full_disk(4096), pytest.raises(OSError, match=r"File too large: '.*/file'") as e:
        write(tmp_path / "file")
    assert (e.value.errno, e.value.filename) == (errno.EFBIG, str(tmp_path / "file"))
    if write in (_atomic, _array):
        assert os.listdir(tmp_path) == []


def _in_new_directory(path: Path, write: Callable[[Path], None]) -> None:
    with replaced_directory(path) as temp, full_disk(4096):
        (temp / "deep").mkdir()
        write(temp / "deep" / "file")


@pytest.mark.parametrize("write", [_atomic, _appended])
def test_files_of_a_new_directory_are_named_where_they_would_lie(tmp_path, write):
    with pytest.raises(OSError, match="File too large") as e:
        _in_new_directory(tmp_path / "directory", write)
    assert e.value.filename == str(tmp_path / "directory" / "deep" / "file")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_made_or_replaced_is_named_without_a_temporary_name(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        write_atomic(tmp_path / "none" / "file", b"")
    assert missing.value.filename == str(tmp_path / "none" / "file")
    (tmp_path / "there").mkdir()
    with pytest.raises(IsADirectoryError) as there:
        write_atomic(tmp_path / "there", b"")
    assert str(there.value) == f"[Errno 21] Is a directory: '{tmp_path / 'there'}'"
    assert os.listdir(tmp_path) == ["there"]
    with pytest.raises(OSError, match=r"^of the reader$"), atomic_file(tmp_path / "file"):
        raise OSError("of the reader")
