"""A directory equals its list of files, or the error names the file that differs."""

import hashlib
import os
import subprocess

import pytest

from lingvo_moe.core.files.manifest import ManifestError, verify_manifest, write_manifest

NAME = "extra/list.sha256"


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "extra").mkdir()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty").touch()
    (tmp_path / "deep" / "er" / "größe 1").write_text("x")
    write_manifest(tmp_path, NAME)
    return tmp_path


def test_what_is_listed_is_every_file_with_its_digest(directory):
    verify_manifest(directory, NAME)
    lines = (directory / NAME).read_text().splitlines()
    assert [line.split("  ")[1] for line in lines[:-1]] == ["deep/er/größe 1", "empty", "weights"]
    assert lines[2].startswith(hashlib.sha256(bytes(range(256)) * 40).hexdigest())
    write_manifest(directory, NAME)  # again: the list is not in itself
    assert (directory / NAME).read_text().splitlines() == lines


def test_sha256sum_reads_the_list(directory):
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", NAME], cwd=directory, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout == "deep/er/größe 1: OK\nempty: OK\nweights: OK\n"


def _change(file, edit):
    file.write_bytes(edit(file.read_bytes()))


@pytest.mark.parametrize("spoil, message", [
    (lambda d: _change(d / "weights", lambda b: b[:-1]), "weights was changed or damaged"),
    (lambda d: (d / "empty").unlink(), "empty is missing"),
    (lambda d: (d / "deep" / "er").rename(d / "deep" / "es"), "deep/er/größe 1 is missing"),
    (lambda d: (d / "deep" / "more").touch(), f"deep/more is not in {NAME}"),
    (lambda d: (d / NAME).unlink(), f"{NAME}, the list of files, is missing"),
    (lambda d: _change(d / NAME, lambda b: b""), f"{NAME}, the list of files, was changed"),
    (lambda d: _change(d / NAME, lambda b: b[b.index(b"\n") + 1 :]), "was changed"),
    (lambda d: _change(d / NAME, lambda b: b.replace(b"empty", b"other")), "was changed"),
])  # fmt: skip
def test_the_file_that_differs_is_named(directory, spoil, message):
    spoil(directory)
    with pytest.raises(ManifestError) as caught:
        verify_manifest(directory, NAME)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{directory}: ")


def test_a_name_that_the_list_could_not_hold(directory):
    (directory / "two\nlines").touch()
    with pytest.raises(ValueError, match=r"holds a newline: 'two\\nlines'"):
        write_manifest(directory, NAME)


def test_a_link_to_a_file_is_what_is_in_the_file(directory, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "weights"
    (directory / "weights").rename(elsewhere)
    (directory / "weights").symlink_to(elsewhere)
    verify_manifest(directory, NAME)
    _change(elsewhere, lambda b: b[:-1])
    with pytest.raises(ManifestError, match="weights was changed or damaged"):
        verify_manifest(directory, NAME)
    elsewhere.unlink()
    with pytest.raises(ManifestError, match="weights leads to no file"):
        verify_manifest(directory, NAME)


@pytest.mark.parametrize("make, message", [
    (lambda at: at.symlink_to(at.parent), "is a symbolic link to a directory"),
    (lambda at: at.symlink_to("er"), "is a symbolic link to a directory"),
    (os.mkfifo, "is no file but a pipe or a device"),
], ids=["a circle", "its neighbour", "a pipe"])  # fmt: skip
def test_what_cannot_be_read_to_its_end_is_refused(directory, make, message):
    make(directory / "deep" / "odd")
    for work in (verify_manifest, write_manifest):
        with pytest.raises(ManifestError, match=rf"^{directory}: deep/odd {message}"):
            work(directory, NAME)
