"""Every path either works with all libraries or is refused before anything is written."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies as st

from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.loop.summaries import Summaries, read_metrics
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.core.files.paths import PathError, check_local, check_portable
from lingvo_moe.core.nested_map import NestedMap

_ALLOWED = "".join(chr(c) for c in range(1, 128) if chr(c) not in "[]\\/")


@pytest.mark.parametrize("path, message", [
    ("gs://bucket/run", "--logdir=gs://bucket/run: remote storage is not supported"),
    ("hdfs://host:9000/run", "remote storage"),
    ("a+b-c.d://x", "remote storage"),
    (Path("gs://bucket/run"), "remote storage"),  # pathlib makes it gs:/bucket/run
    ("~/run", "write --logdir=$HOME/run, or ./~/run"),
    ("a\udcff", r"--logdir='a\udcff': the name is not UTF-8"),
    ("a\0b", "null"),
])  # fmt: skip
def test_refused_for_all(path, message):
    for check in (check_local, check_portable):
        with pytest.raises(PathError) as e:
            check(path, "--logdir")
        assert message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("path, message", [
    ("/data/run [1]", "--logdir=/data/run [1]: checkpoints and models could not be read again"),
    ("a]", "a directory with ] in its path"),
    ("a\\b", r"a directory with \ in its path"),
    ("x/" * 2000, "bytes long; at most 3840"),
])  # fmt: skip
def test_refused_for_runs_and_models(path, message):
    check_local(path, "--logdir")
    with pytest.raises(PathError) as e:
        check_portable(path, "--logdir")
    assert message in str(e.value)


def test_the_working_directory_counts(tmp_path, monkeypatch):
    (tmp_path / "[x]").mkdir()
    monkeypatch.chdir(tmp_path / "[x]")
    with pytest.raises(PathError, match=r"^--logdir=run: .* choose another path; a symbolic link"):
        check_portable("run", "--logdir")
    (tmp_path / "link").symlink_to("[x]")
    check_portable(tmp_path / "link/run", "--logdir")


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=20))
def test_names_are_refused_for_what_libraries_misread_and_nothing_else(name):
    """All names are accepted except those that some library misread."""
    path = f"/data/{name}"
    bad = set(name) & set("[]\\\0") or any("\ud800" <= c <= "\udfff" for c in name)
    if bad:
        with pytest.raises(PathError) as e:
            check_portable(path, "--logdir")
        assert "/data/" in str(e.value) and len(str(e.value).splitlines()) == 1
    else:
        check_portable(path, "--logdir")


class _Double(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def double(self, x):
        return 2.0 * x


def _round_trip(place):
    """Saves a checkpoint, a summary and a model, and reads them again."""
    specs = NestedMap(theta=NestedMap(w=TensorSpec((4,), "float32")))
    state = NestedMap(theta=NestedMap(w=np.arange(4, dtype=np.float32)))
    with Checkpointer(str(place / "checkpoints")) as checkpointer:
        checkpointer.Save(3, state, {"a": 1})
    with Checkpointer(str(place / "checkpoints"), read_only=True) as checkpointer:
        found, extra = checkpointer.Restore(specs, TfEngine())
    assert np.asarray(found.theta.w).tolist() == [0, 1, 2, 3] and extra == {"a": 1}
    with Summaries(str(place / "train")) as summaries:
        summaries.Write(1, {"loss": np.float32(2.0)})
    assert read_metrics(str(place / "train")) == [{"step": 1, "loss": 2.0}]
    tf.saved_model.save(_Double(), str(place / "model"))
    assert tf.saved_model.load(str(place / "model")).double(2.0) == 4.0


@pytest.mark.parametrize("name", [_ALLOWED, "gs:", "日本 é\n\u200b*"])
def test_what_is_accepted_is_written_and_read_again(tmp_path, name):
    place = tmp_path / name / "below"
    check_portable(place, "--logdir")
    _round_trip(place)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_link_leads_to_what_cannot_be_named(tmp_path):
    """A symbolic link is the remedy that the error suggests."""
    (tmp_path / "[x]\\").mkdir()
    (tmp_path / "link").symlink_to("[x]\\")
    _round_trip(tmp_path / "link")
