"""A whole run in a bucket (moto's): trained, killed, gone on with, read; data and exported models there."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import toy_task
import toy_translation as toy
from object_storage import bucket
from processes import start_python
from trainer_testing import flags, losses, status, write_corpus

from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.files import copies
from lingvo_moe.core.files.copies import kept_copy, local, local_copy, upload
from lingvo_moe.core.files.manifest import ManifestError, write_manifest
from lingvo_moe.core.files.store import Bucket, StoreError, open_store
from lingvo_moe.core.runs import bucket_lock
from lingvo_moe.core.runs.directories import EXPORTED, OutputError, check_replaceable
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.text.data.scan import scan
from tools import goodput

_SUSPENSIONS = int(os.environ.get("SUSPENSIONS", "1"))
_SEED = int(os.environ.get("SUSPENSIONS_SEED", "0"))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def storage():
    with bucket() as found:
        yield found


@pytest.fixture(autouse=True)
def another_machine(monkeypatch, tmp_path):
    """Has no copies yet, and is hasty: a writer that is dead for two seconds is dead."""
    monkeypatch.setattr(copies, "_copies", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket_lock, "RENEWAL", 0.2)
    monkeypatch.setattr(bucket_lock, "PATIENCE", 2.0)


def _flags(logdir, steps, *more):
    override = "train.summary_interval_steps=1;train.save_interval_steps=2;train.profile_steps=1-2"
    given = [
        "--model=toy_task.Line",
        f"--logdir={logdir}",
        f"--max_steps={steps}",
        "--engine=tf_graph",
    ]
    return [*given, f"--model_params_override={override}", *more]


def _losses(address):
    return losses(local_copy(address).path)


def test_a_run_goes_on_in_a_bucket_as_on_disk(storage, tmp_path, monkeypatch, capsys):
    assert status(*_flags(tmp_path / "run", 6)) == 0
    address = f"s3://bucket/{tmp_path.name}/run"
    storage.faults.extend(["500", "slow", "cut", "500 after", "503"])
    assert status(*_flags(address, 4)) == 0
    monkeypatch.setattr(copies, "_copies", {})
    assert status(*_flags(address, 6)) == 0
    assert _losses(address) == losses(tmp_path / "run")
    assert RunDir(address).steps == RunDir(tmp_path / "run").steps
    names = {name.split("/")[0] for name in open_store(address).List()}
    on_disk = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == on_disk - {".trainer.lock"} | {"WRITER"}
    assert sum(".tfevents." in name for name in open_store(address).List()) == 2
    assert sum("/plugins/profile/steps_1-2/" in n for n in open_store(address).List()) == 2
    assert goodput.main([f"--logdir={address}"]) == 0
    assert "6 steps" in capsys.readouterr().out
    assert status(*_flags(address, 6, "--restart")) == 2
    assert f"--logdir={address}: --restart and --mode=eval work on runs" in capsys.readouterr().err


def test_a_second_trainer_is_refused(storage, tmp_path, capsys):
    address = f"s3://bucket/{tmp_path.name}/run"
    with bucket_lock.BucketRunLock(address) as lock:
        lock.Acquire()
        assert status(*_flags(address, 2)) == 2
    assert f"error: {address}: another writer is at work there" in capsys.readouterr().err
    assert open_store(address).List() == ["WRITER"]


def test_what_cannot_be_compiled_leaves_nothing_there(storage, tmp_path, monkeypatch, capsys):
    def mistaken(self, theta, batch, seed=None):
        raise ValueError("a mistake in FProp")

    monkeypatch.setattr(toy_task.LinearModel, "FProp", mistaken)
    address = f"s3://bucket/{tmp_path.name}/run"
    assert status(*_flags(address, 2)) in (1, 2)
    assert "a mistake in FProp" in capsys.readouterr().err
    assert open_store(address).List() == ["WRITER"]  # an ended lock stays


def test_a_mistake_of_a_suspended_trainer_removes_nothing_of_its_successor(
    storage, tmp_path, monkeypatch, capsys
):
    address = f"s3://bucket/{tmp_path.name}/run"

    def overtaken(self, theta, batch, seed=None):
        store = Bucket(address)
        another = b'{"process": "another"}'
        while not store.Replace("WRITER", another, store.Version("WRITER").generation):
            pass  # the trainer renewed its lock in between
        raise ValueError("a mistake in FProp")

    monkeypatch.setattr(toy_task.LinearModel, "FProp", overtaken)
    assert status(*_flags(address, 2)) in (1, 2)
    assert "what was begun there stays: " in capsys.readouterr().err
    assert "experiment.json" in open_store(address).List()


def test_killed_it_has_the_lines_of_all_steps_before_its_checkpoint(storage, tmp_path):
    address = f"s3://bucket/{tmp_path.name}/run"
    command = ("-m", "lingvo_moe.trainer", *_flags(address, 10**6))
    with start_python(*command, stdout=None, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None and max(RunDir(address).steps, default=0) < 6:
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
    local_copy(address).Fetch()
    last = RunDir(address).steps[-1]
    assert last >= 6 and set(range(1, last + 1)) <= set(_losses(address))


_HASTY = """
import sys
from lingvo_moe import trainer
from lingvo_moe.core.runs import bucket_lock
bucket_lock.RENEWAL, bucket_lock.PATIENCE, bucket_lock.PUSHING = 0.2, 2.0, 0.5
sys.exit(trainer.main(sys.argv[1:]))
"""


def test_suspended_trainers_end_and_their_successors_go_on(storage, tmp_path):
    """Each is suspended at a random time, for several times as long as a writer is waited for."""
    address, log, rng = f"s3://bucket/{tmp_path.name}/run", tmp_path / "log", random.Random(_SEED)

    def start(stack):
        command = ("-c", _HASTY, *_flags(address, 10**6))
        with open(log, "ab") as out:
            child = start_python(*command, stdout=subprocess.DEVNULL, stderr=out)
        stack.callback(child.wait)
        stack.callback(child.kill)
        return child

    def train(child, more):
        until = max(RunDir(address).steps, default=0) + more
        while child.poll() is None and max(RunDir(address).steps, default=0) < until:
            time.sleep(0.05)
        assert child.poll() is None, log.read_text()

    with contextlib.ExitStack() as stack:
        trainers = [start(stack)]
        train(trainers[0], 4)
        for _ in range(_SUSPENSIONS):
            time.sleep(rng.uniform(0, 2))
            trainers[-1].send_signal(signal.SIGSTOP)
            trainers.append(start(stack))
            train(trainers[-1], 4)
            trainers[-2].send_signal(signal.SIGCONT)
            assert trainers[-2].wait(120) == 2, log.read_text()
            train(trainers[-1], 2)
        trainers[-1].send_signal(signal.SIGTERM)
        assert trainers[-1].wait(120) == 128 + signal.SIGTERM
    assert log.read_text().count("another writer is at work there") == _SUSPENSIONS
    local_copy(address).Fetch()
    done = RunDir(address)
    assert status(*_flags(tmp_path / "run", done.steps[-1])) == 0
    assert _losses(address) == losses(tmp_path / "run")
    with Checkpointer(done.checkpoint_dir, read_only=True) as reader:
        for step in done.steps:
            reader.RestoreToNumpy(step=step)


def test_data_are_read_from_a_bucket(storage, tmp_path, capsys):
    address = f"s3://bucket/{tmp_path.name}"
    data = write_corpus(tmp_path / "data")
    assert status(*flags(f"{address}/data", tmp_path / "no", 1)) == 2  # nothing is there
    told = "holds no list of its files (prepared.sha256 or corpus.sha256)"
    assert told in capsys.readouterr().err
    (data / "corpus.json").write_text(json.dumps({"list": "corpus.sha256"}))
    write_manifest(data, "corpus.sha256")
    upload(data, f"{address}/data", "corpus.sha256")
    shutil.rmtree(data)
    assert scan(f"{address}/data").pairs == {"aa": 400, "bb": 150, "cc": 50}
    open_store(f"{address}/data").Write("aa.tsv", b"x\ty\n")
    kept_copy.cache_clear()
    assert scan(f"{address}/data").pairs["aa"] == 400  # the copy is whole, and of this list
    shutil.rmtree(tmp_path / "cache")
    kept_copy.cache_clear()
    with pytest.raises(ManifestError, match=rf"a copy of {address}/data: .*aa.tsv was changed"):
        kept_copy(f"{address}/data", ("corpus.sha256",))


def test_a_model_is_exported_to_a_bucket_and_used_from_there(storage, tmp_path):
    address = f"s3://bucket/{tmp_path.name}/model"
    lines = toy.sentences(4)
    made = toy.save_export(address).Translate(lines)
    assert SavedTranslator(address).Translate(lines).translations == made.translations


def test_an_upload_is_whole_once_its_list_is_there(storage, tmp_path):
    model, address = tmp_path / "model", f"s3://bucket/{tmp_path.name}/model"
    (model / "assets").mkdir(parents=True)
    for name in ("assets/a", "saved_model.pb", "list"):
        (model / name).write_text(name)
    upload(model, address, "list")
    (model / "assets" / "a").rename(model / "assets" / "b")
    storage.faults.extend([""] * 3 + ["500"] * 500)
    with pytest.raises(StoreError):
        upload(model, address, "list")
    storage.faults.clear()
    assert not open_store(address).Has("list")
    upload(model, address, "list")
    assert open_store(address).List() == ["assets/b", "list", "saved_model.pb"]
    with pytest.raises(OutputError, match="holds 'list', which is no part of an exported model"):
        check_replaceable(address, EXPORTED)


def test_a_copy_takes_no_name_that_leads_out_of_it_and_writes_back_what_changed(caplog):
    store = open_store("memory://x/place")
    store.Write("a/b", b"1")
    store.Write("checkpoints/1/COMMIT", b"")
    for folder in ("a/", "checkpoints/", "train/"):  # as consoles and mounts make them
        store.Write(folder, b"")
    copy = local_copy("memory://x/place/")
    assert local("memory://x/place") == copy.path and copy.path.parts[-3:] == (
        "memory:",
        "x",
        "place",
    )
    assert [p.name for p in copy.path.rglob("*")] == ["a", "b"]
    (copy.path / "a" / "c").write_text("2")
    store.Write("a/b", b"by another")
    copies.push_all()
    assert store.Read("a/c") == b"2" and store.Read("a/b") == b"by another"
    (copy.path / "a" / "b").write_text("late")
    copies.push_all()
    assert store.Read("a/b") == b"by another" and "place/a/b: was written by another" in caplog.text
    store.Delete("a/c")
    copy.Fetch()
    assert [p.name for p in copy.path.rglob("*")] == ["a", "b"]
    assert (copy.path / "a" / "b").read_text() == "by another"
    store.Write("../x", b"")
    with pytest.raises(StoreError, match=r"an object '../x', which no file can be called"):
        copy.Fetch()
