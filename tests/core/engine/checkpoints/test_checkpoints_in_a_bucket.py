"""Checkpoints in S3 (moto's): complete or absent, exact, whatever the storage answers and whoever else writes."""

import hashlib
import logging
import os
import random

import pytest
from object_storage import FAULTS, bucket
from test_checkpoints import MESH, SPECS, _assert_equal, _values, check_killed_while_saving

from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
from lingvo_moe.core.engine.checkpoints.run_weights import read_newest, was_deleted
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.core.files.copies import LocalCopy
from lingvo_moe.core.files.manifest import ManifestError
from lingvo_moe.core.files.store import StoreError, open_store
from lingvo_moe.core.runs import bucket_lock
from lingvo_moe.core.runs.run_lock import RunLockError
from lingvo_moe.core.runs.saved_steps import COMMIT, LIST, saved_steps
from lingvo_moe.core.sharding import Mesh


@pytest.fixture(scope="module")
def storage():
    with bucket() as found:
        yield found


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """A writer that is dead for two seconds is dead."""
    monkeypatch.setattr(bucket_lock, "RENEWAL", 0.2)
    monkeypatch.setattr(bucket_lock, "PATIENCE", 2.0)


@pytest.fixture
def place(storage, tmp_path) -> str:
    return f"s3://bucket/{tmp_path.name}/checkpoints"


def _save(place, *steps, keep=3):
    engine = PjrtEngine(MESH)
    with Checkpointer(place, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.Save(step, engine.Put(_values(step), SPECS), {"input": {"row": step}})


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: PjrtEngine(Mesh.parse("expert:2")), TfEngine])
def test_restored_exactly_on_any_mesh_and_engine(place, make):
    _save(place, 1, 2, 3, keep=2)
    engine = make()
    with Checkpointer(place, read_only=True) as checkpointer:
        assert checkpointer.Steps() == [2, 3]
        for step in (2, 3):
            state, extra = checkpointer.Restore(SPECS, engine, step)
            _assert_equal(engine.Get(state), _values(step))
            assert extra == {"input": {"row": step}}
    assert not open_store(f"{place}/1").List()
    assert was_deleted(place, 1) and not was_deleted(place, 3)
    assert read_newest(place, lambda _, step: step) == 3


def test_of_two_writers_the_second_is_refused(place):
    with Checkpointer(place) as first:
        first.Save(1, _values(1))
        first.Wait()
        for _ in range(2):
            with pytest.raises(RunLockError, match=rf"^{place}: another writer is .*{os.getpid()}"):
                Checkpointer(place)
        with Checkpointer(place, read_only=True) as reader:
            reader.Steps()
        first.Save(2, _values(2))
    with Checkpointer(place) as second:
        assert second.Steps() == [1, 2]


def test_who_was_taken_for_dead_completes_no_step(storage, place):
    first = Checkpointer(place)
    first._lock._closing.set()  # it stands still
    first._lock._thread.join()
    second = Checkpointer(place)
    first._lock._closing.clear()
    first._lock._KeepRenewing()  # and wakes
    first.Save(1, _values(1))
    with pytest.raises(CheckpointError, match=r"another writer is at work there"):
        first.Wait()
    second.Save(2, _values(2))
    second.Close()
    first.Close()
    assert saved_steps(place).Steps() == [2]


def test_a_lock_is_renewed_through_failures_until_another_writer_has_it(monkeypatch):
    place = open_store("memory://x/lock")
    lock = bucket_lock.BucketLock(place)
    lock._closing.set()
    lock._thread.join()
    lock._closing.clear()
    replace, version, asked = place.Replace, place.Version, []

    def written_and_failed(*args):
        replace(*args)
        raise StoreError("no answer")

    def failed_once(name):
        asked.append(name)
        if len(asked) == 1:
            raise StoreError("no answer")
        return version(name)

    monkeypatch.setattr(place, "Replace", written_and_failed)
    with pytest.raises(StoreError):
        lock._Renewed()
    monkeypatch.setattr(place, "Replace", replace)
    lock._generation = lock._Renewed()
    place.Write(bucket_lock.WRITER, b"another's")
    monkeypatch.setattr(place, "Version", failed_once)
    lock._KeepRenewing()
    with pytest.raises(RunLockError, match="another writer is at work there"):
        lock.Check()
    lock.Close()
    assert place.Read(bucket_lock.WRITER) == b"another's"


def test_a_run_that_cannot_be_copied_is_locked_no_longer(monkeypatch):
    def full():
        raise OSError("no space")

    copy = LocalCopy("memory://x/run")
    monkeypatch.setattr(copy, "Fetch", full)
    with pytest.raises(OSError, match="no space"):
        bucket_lock.HeldRun(copy)
    bucket_lock.BucketLock(copy.store).Close()


def test_a_step_is_completed_once(place):
    steps = saved_steps(place)
    steps.Part(1).Write(LIST, b"")
    assert [steps.Complete(1, digest * 64) for digest in "ab"] == [True, False]
    with pytest.raises(ManifestError, match="COMMIT was changed"):
        steps.CheckCommit(1, "b" * 64)


def test_a_commit_that_leads_to_no_file_is_that_of_nobody(place):
    late, steps = saved_steps(place), saved_steps(place)
    late.Part(1).Write(LIST, b"")
    steps.Clear(steps.Leftovers())
    assert late.Complete(1, "a" * 64) and not steps.Steps() and not steps.Has(1)
    assert not steps.Leftovers()
    steps.Part(1).Write(LIST, b"")
    assert steps.Complete(1, "b" * 64) and steps.Steps() == [1] and steps.Has(1)
    assert steps.Of(1).List() == [LIST]
    late.Part(1).Write("x", b"")
    assert steps.Leftovers() == [f"1/{late.writer}"]
    steps.Delete(1)
    assert not steps.store.List()


def test_a_step_of_an_older_version_is_read_and_deleted(place):
    """Its files are beside COMMIT, which has the digest of their list alone."""
    _save(place, 1, 2)
    for step in (1, 2):
        files, there = saved_steps(place).Of(step), open_store(f"{place}/{step}")
        for name in files.List():
            there.Write(name, files.Read(name))
        files.DeleteAll()
        there.Write(COMMIT, hashlib.sha256(there.Read(LIST)).hexdigest().encode())
    with Checkpointer(place, keep=2) as checkpointer:
        assert checkpointer.Steps() == [1, 2]
        _assert_equal(checkpointer.RestoreToNumpy()[0], _values(2))
        checkpointer.Save(3, _values(3))
        checkpointer.Wait()
        assert checkpointer.Steps() == [2, 3] and not open_store(f"{place}/1").List()
    open_store(f"{place}/2").Delete(COMMIT)
    with Checkpointer(place) as checkpointer:
        assert checkpointer.Steps() == [3] and not open_store(f"{place}/2").List()


def test_where_no_step_is_whole_another_address_is_advised(place):
    _save(place, 1)
    saved_steps(place).Of(1).Delete("about/metadata")
    with Checkpointer(place, read_only=True) as checkpointer:
        with pytest.raises(CheckpointError, match="begin again, at another address"):
            checkpointer.ReadExtra()


def test_a_step_without_commit_is_not_used_and_said(place, caplog):
    _save(place, 1, 2)
    step = open_store(f"{place}/2")
    step.Delete(COMMIT)
    with caplog.at_level(logging.WARNING), Checkpointer(place, read_only=True) as checkpointer:
        assert checkpointer.Steps() == [1]
        assert f"{place}/2 has no object COMMIT" in caplog.text
    (listed,) = (name for name in step.List() if name.endswith(LIST))
    step.Delete(listed)  # as after a kill
    caplog.clear()
    with Checkpointer(place) as checkpointer:
        assert checkpointer.Steps() == [1] and not step.List() and not caplog.text


def test_a_bad_day_of_the_storage_changes_nothing(storage, place):
    rng = random.Random(0)
    for step in range(1, 5):
        storage.faults.extend(rng.choice([*FAULTS, "", "", ""]) for _ in range(12))
        _save(place, step)
    with Checkpointer(place, read_only=True) as checkpointer:
        assert checkpointer.Steps() == [2, 3, 4]
        for step in (2, 3, 4):
            storage.faults.extend(rng.choice([*FAULTS, "", "", ""]) for _ in range(12))
            _assert_equal(checkpointer.RestoreToNumpy(step=step)[0], _values(step))
    storage.faults.clear()


def test_storage_that_fails_for_good_loses_nothing(storage, place):
    _save(place, 1)
    with Checkpointer(place) as checkpointer:
        storage.faults.extend(["500"] * 500)
        checkpointer.Save(2, _values(2))
        message = r"a checkpoint could not be written \(.*attempts failed"
        with pytest.raises(CheckpointError, match=message):
            checkpointer.Wait()
        storage.faults.clear()
    _save(place, 3)
    with Checkpointer(place, read_only=True) as checkpointer:
        assert checkpointer.Steps() == [1, 3]


def test_killed_while_saving_the_newest_complete_step_is_whole(place):
    # The pause is long, since each look for step 2 is a request.
    check_killed_while_saving(place, 1 << 18, lambda: saved_steps(place).Has(2), pause=0.2)
