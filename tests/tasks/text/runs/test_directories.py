"""Commands write nothing over, into or around directories that this would damage."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lingvo_moe.core.files.paths import PathError
from lingvo_moe.core.runs.directories import (
    CORPUS,
    EXPORTED,
    PREPARED,
    RUN,
    OutputError,
    check_addable,
    check_beside,
    check_logdir,
    check_replaceable,
    recognise,
)
from lingvo_moe.core.runs.run_lock import LOCK_FILE, RunLock
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

_MARKS = {
    "run": (RUN, "experiment.json"),
    "begins": (RUN, LOCK_FILE),
    "prepared": (PREPARED, "prepared.json"),
    "corpus": (CORPUS, "corpus.json"),
    "model": (EXPORTED, "saved_model.pb"),
}


@pytest.fixture
def tmp(tmp_path: Path) -> Iterator[Path]:
    """A directory of each kind, a trainer that begins, an empty directory, one with notes, and a link to the run."""
    for name, (_, mark) in _MARKS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / mark).touch()
    (tmp_path / "run/checkpoints").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").touch()
    (tmp_path / "link").symlink_to("run")
    with RunLock(tmp_path / "begins") as lock:
        lock.Acquire()
        yield tmp_path


def test_each_is_known(tmp):
    for name, (kind, mark) in _MARKS.items():
        found = recognise(tmp / name)
        assert found is not None and found.kind is kind and mark in str(found)
    assert str(recognise(tmp / "link")) == "a run (it holds experiment.json)"
    for name in ("empty", "notes", "notes/a.txt", "none"):
        assert recognise(tmp / name) is None


@pytest.mark.parametrize("kind", [PREPARED, CORPUS, EXPORTED], ids=str)
def test_only_the_same_kind_is_replaced(tmp, kind):
    own = next(name for name, (of, _) in _MARKS.items() if of is kind)
    accepted = {own, "empty", "new", "new/deep", "notes/new"}
    for name in accepted:
        check_replaceable(tmp / name, kind)
    for name in {*_MARKS, "notes", "link", "notes/a.txt"} - accepted:
        with pytest.raises(OutputError, match=f"^--output={tmp / name} (holds|is) "):
            check_replaceable(tmp / name, kind)
    for name in _MARKS:  # nor is anything made inside of one
        for inside in ("new", "checkpoints", "a/b"):
            with pytest.raises(OutputError, match=f"lies inside {tmp / name}, which is"):
                check_replaceable(tmp / name / inside, kind)
    with pytest.raises(OutputError, match=f"lies inside {tmp / 'run'}, which is a run"):
        check_replaceable(tmp / "link/new", kind)


def test_nothing_of_others_is_lost_with_what_is_replaced(tmp):
    (tmp / "model/variables").mkdir()
    check_replaceable(tmp / "model", EXPORTED)
    (tmp / "model/run").mkdir()
    with pytest.raises(OutputError, match="'run', which is no part of an exported model and would"):
        check_replaceable(tmp / "model", EXPORTED)


def test_the_working_directory_is_not_replaced(tmp, monkeypatch):
    monkeypatch.chdir(tmp / "empty")
    with pytest.raises(OutputError, match=r"^--output=\. is the directory that you are in"):
        check_replaceable(".", EXPORTED)


@pytest.mark.parametrize("path, accepted", [
    ("run/eval/report.json", True),
    ("run/experiment.json", False),
    ("run/vocab", False),
    ("run/.trainer.lock.1", False),
    ("link/checkpoints/x", False),
    ("model/assets/x", False),
    ("prepared/x.json", False),
    ("prepared/records", False),
    ("corpus/de.tsv", False),
    ("notes/a.txt", True),
    ("new/x", True),
])  # fmt: skip
def test_what_is_added_changes_nothing_that_is_there(tmp, path, accepted):
    if accepted:
        check_addable(tmp / path, "--out")
    else:
        with pytest.raises(OutputError, match=f"^--out={tmp / path} (is|would change) "):
            check_addable(tmp / path, "--out")
    assert not os.path.exists(tmp / "new")


def _refusals(directory: Path) -> list[str]:
    """The errors of commands that would write into a directory: of all of them, or none."""
    said = []
    for check in (
        lambda: check_beside(directory / "new", "--output"),
        lambda: check_addable(directory, "--output"),
        lambda: check_logdir(directory / "a", {}),
        lambda: check_replaceable(directory / "data", PREPARED),
    ):
        try:
            check()
        except OutputError as e:
            said.append(str(e))
    assert len(said) in (0, 4)
    return said


@pytest.mark.parametrize("files, mark", [
    ((LOCK_FILE,), ""),
    (("checkpoints", "train"), ""),
    (("experiment.json", LOCK_FILE, "params.txt"), "it holds experiment.json"),
    (("experiment.json", "checkpoints"), "it holds experiment.json"),
])  # fmt: skip
def test_a_run_is_recognised_by_its_description(tmp_path, files, mark):
    """A lock file that nobody holds does not make a run."""
    for name in files:
        (tmp_path / name).touch()
    said = _refusals(tmp_path)
    assert bool(said) == bool(mark)
    assert all(f" is a run ({mark}); name " in text for text in said)


def test_the_lock_of_another_process_marks_a_run(tmp_path):
    """The first was killed, and its file stayed."""
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.Acquire()
        second.Join(first.token, 1)
        first.Close()
        (tmp_path / LOCK_FILE).touch()
        said = _refusals(tmp_path)
        assert said and all(f" is a run (a trainer holds {LOCK_FILE}.1 in it)" in s for s in said)
    assert not _refusals(tmp_path)


def test_a_run_is_nowhere_that_it_could_not_be_read_from():
    for path in ("az://bucket/run", Path("az://bucket/run"), "runs[1]"):
        with pytest.raises(PathError, match=r"^--logdir="):
            TextRunDir(path)
