"""What may be written where: nothing over, into or around what it would damage."""

import os
from pathlib import Path

import pytest

from lingvo_moe.core.paths import PathError
from lingvo_moe.core.run_lock import LOCK_FILE
from lingvo_moe.tasks.mt.directories import (
    CORPUS,
    EXPORTED,
    PREPARED,
    RUN,
    OutputError,
    check_addable,
    check_replaceable,
    kind_of,
)
from lingvo_moe.tasks.mt.run_dir import RunDir

_MARKS = {
    "run": (RUN, "experiment.json"),
    "begins": (RUN, LOCK_FILE),
    "prepared": (PREPARED, "prepared.json"),
    "corpus": (CORPUS, "corpus.json"),
    "model": (EXPORTED, "saved_model.pb"),
}


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    """One of each, an empty directory, one with notes, and a link to the run."""
    for name, (_, mark) in _MARKS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / mark).touch()
    (tmp_path / "run/checkpoints").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").touch()
    (tmp_path / "link").symlink_to("run")
    return tmp_path


def test_each_is_known(tmp: Path) -> None:
    for name, (kind, _) in _MARKS.items():
        assert kind_of(tmp / name) is kind
    assert kind_of(tmp / "link") is RUN
    for name in ("empty", "notes", "notes/a.txt", "none"):
        assert kind_of(tmp / name) is None


@pytest.mark.parametrize("kind", [PREPARED, CORPUS, EXPORTED], ids=str)
def test_only_the_same_kind_is_replaced(tmp: Path, kind) -> None:
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


def test_nothing_of_others_is_lost_with_what_is_replaced(tmp: Path) -> None:
    (tmp / "model/variables").mkdir()
    check_replaceable(tmp / "model", EXPORTED)
    (tmp / "model/run").mkdir()
    with pytest.raises(OutputError, match="'run' is no part of the exported model there and would"):
        check_replaceable(tmp / "model", EXPORTED)


def test_the_working_directory_is_not_replaced(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp / "empty")
    with pytest.raises(OutputError, match=r"^--output=\. is the directory that you are in"):
        check_replaceable(".", EXPORTED)


@pytest.mark.parametrize(
    "path, accepted",
    [
        ("run/report.html", True),
        ("run/eval", True),
        ("run/eval/report.json", True),
        ("run/experiment.json", False),
        ("run/vocab", False),
        ("run/train/x", False),
        ("run/manifest.sha256", False),
        ("run/.trainer.lock.1", False),
        ("link/checkpoints/x", False),
        ("run", False),
        ("model/x", False),
        ("model/assets/x", False),
        ("prepared/x.json", True),
        ("prepared/de.tsv", False),
        ("prepared/de.tsv.gz", False),
        ("prepared/records", False),
        ("corpus/de.tsv", False),
        ("corpus/out.txt", True),
        ("notes/a.txt", True),
        ("new/x", True),
    ],
)
def test_what_is_added_changes_nothing_that_is_there(tmp: Path, path: str, accepted: bool) -> None:
    if accepted:
        check_addable(tmp / path, "--out")
    else:
        with pytest.raises(OutputError, match=f"^--out={tmp / path} (is|would change) "):
            check_addable(tmp / path, "--out")
    assert not os.path.exists(tmp / "new")


def test_a_run_is_nowhere_that_it_could_not_be_read_from() -> None:
    for path in ("gs://bucket/run", Path("gs://bucket/run"), "runs[1]"):
        with pytest.raises(PathError, match=r"^--logdir="):
            RunDir(path)
