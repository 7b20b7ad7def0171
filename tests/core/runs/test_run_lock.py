"""The lock of a run's directory belongs to one trainer while it lives, and to no child process that outlives it."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from lingvo_moe.core.runs.run_lock import (
    EVALUATOR,
    LOCK_FILE,
    RunLock,
    RunLockError,
    find_held_lock,
    is_lock_file,
)

# Holds the lock, with a forked child, until it is killed.
_HOLDER = """
import os, sys, time
from lingvo_moe.core.runs.run_lock import RunLock
lock = RunLock(sys.argv[1])
lock.Acquire()
child = os.fork()
if not child:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def test_held_until_it_is_closed(tmp_path):
    run = tmp_path / "run"
    (run / "train").mkdir(parents=True)
    with RunLock(run) as first, RunLock(run) as second:
        first.Acquire()
        with pytest.raises(RunLockError, match=f"^--logdir={run}: another trainer is at work") as e:
            second.Acquire()
        assert f"(process {os.getpid()} on " in str(e.value)
    with RunLock(run) as third:
        third.Acquire()


def test_a_killed_holder_leaves_nothing_although_its_child_lives(tmp_path):
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with RunLock(tmp_path) as lock, pytest.raises(RunLockError, match=str(holder.pid)):
                lock.Acquire()
            holder.kill()
            holder.wait()
            with RunLock(tmp_path) as lock:
                lock.Acquire()
            os.kill(child, 0)  # it is still there
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


def test_a_directory_that_nothing_came_of_goes_again(tmp_path):
    with RunLock(tmp_path / "a/run") as lock:
        lock.Acquire()
        assert (tmp_path / "a/run").is_dir()
    assert not (tmp_path / "a").exists()
    with RunLock(tmp_path / "a/run") as lock:
        lock.Acquire()
        (tmp_path / "a/run/kept").touch()
    assert (tmp_path / "a/run/kept").exists()
    (tmp_path / "empty").mkdir()
    with RunLock(tmp_path / "empty") as lock:
        lock.Acquire()
    assert not os.listdir(tmp_path / "empty")  # as it was found


@pytest.mark.parametrize("name", ["experiment.json", "checkpoints"])
def test_the_file_of_a_run_stays(tmp_path, name):
    with RunLock(tmp_path / "run") as lock:
        lock.Acquire()
        (tmp_path / "run" / name).mkdir()
    assert (tmp_path / "run" / LOCK_FILE).exists()


def test_one_that_waits_takes_no_file_that_is_removed(tmp_path, monkeypatch):
    """Between opening and locking the file, the trainer that made it removes it."""
    run, flock = tmp_path / "run", fcntl.flock
    first = RunLock(run)
    first.Acquire()

    def give_up(handle: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", flock)
        first.Close()
        assert not run.exists()
        flock(handle, how)  # succeeds: nobody holds the file that was opened

    monkeypatch.setattr("fcntl.flock", give_up)
    with RunLock(run) as second:
        second.Acquire()
        with RunLock(run) as third, pytest.raises(RunLockError):
            third.Acquire()


def test_another_trainers_file_is_not_removed(tmp_path):
    """--restart moves the directory, and another trainer locks the new one."""
    run = tmp_path / "run"
    with RunLock(run) as other, RunLock(run) as third:
        with RunLock(run) as first:
            first.Acquire()
            run.rename(tmp_path / "old")
            other.Acquire()
            with pytest.raises(RunLockError):
                first.Acquire()
        with pytest.raises(RunLockError):
            third.Acquire()


def test_processes_that_end_in_any_order_leave_no_file(tmp_path):
    for name, order in (("a", (0, 1)), ("b", (1, 0))):
        locks = RunLock(tmp_path / name), RunLock(tmp_path / name)
        locks[0].Acquire()
        locks[1].Join(locks[0].token, 1)
        for number in order:
            locks[number].Close()
        assert not list(tmp_path.rglob(f"{LOCK_FILE}*"))


def test_a_held_lock_is_found_and_left_as_it_is(tmp_path):
    file = tmp_path / LOCK_FILE
    assert find_held_lock(tmp_path) is None and find_held_lock(tmp_path / "none") is None
    file.write_text("{}")
    assert find_held_lock(tmp_path) is None
    with RunLock(tmp_path) as lock:
        lock.Acquire()
        before = file.read_bytes(), file.stat().st_mtime_ns
        assert find_held_lock(tmp_path) == LOCK_FILE
        assert before == (file.read_bytes(), file.stat().st_mtime_ns)
    file.symlink_to("elsewhere")
    assert find_held_lock(tmp_path) is None
    file.unlink()
    os.mkfifo(file)
    assert find_held_lock(tmp_path) is None


def test_the_lock_goes_with_the_name_when_the_directory_is_moved(tmp_path):
    """Both the new and the old directory are locked until a trainer with --restart ends."""
    run = tmp_path / "run"
    with RunLock(run) as first, RunLock(run) as second, RunLock(tmp_path / "old") as old:
        first.Acquire()
        run.rename(tmp_path / "old")
        with pytest.raises(RunLockError):
            old.Acquire()
        first.Acquire()
        with pytest.raises(RunLockError):
            second.Acquire()
        old.Acquire()


def test_a_lock_file_that_is_replaced_meanwhile_is_not_mistaken_for_the_lock(tmp_path, monkeypatch):
    """Between opening and locking the file, the directory is moved and another trainer starts there."""
    run = tmp_path / "run"
    run.mkdir()
    other, flock = RunLock(run), fcntl.flock

    def moved(handle: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", flock)
        run.rename(tmp_path / "old")
        other.Acquire()
        flock(handle, how)  # succeeds: nobody holds the file that was opened

    monkeypatch.setattr("fcntl.flock", moved)
    with other, RunLock(run) as lock, pytest.raises(RunLockError):
        lock.Acquire()


def test_other_processes_of_the_job(tmp_path):
    run, wrong = tmp_path / "run", tmp_path / "wrong"
    with RunLock(run) as first, RunLock(run) as second, RunLock(wrong) as astray:
        first.Acquire()
        second.Join(first.token, 1)
        with RunLock(run) as again, pytest.raises(RunLockError, match="another trainer is at"):
            again.Join(first.token, 1)
        with pytest.raises(RunLockError, match="process 1 sees another directory there than"):
            astray.Join(first.token, 1)
        astray.Acquire()  # another job's
        with RunLock(wrong) as astray_too, pytest.raises(RunLockError, match="another directory"):
            astray_too.Join(first.token, 1)
        first.Close()
        with RunLock(run) as later, pytest.raises(RunLockError, match="another trainer is at work"):
            later.Acquire()  # process 1 may still be writing
        second.Close()
        with RunLock(run) as later:
            later.Acquire()
    assert not (run / f"{LOCK_FILE}.1").exists()


def test_a_trainer_and_an_evaluator_work_beside_each_other(tmp_path):
    (tmp_path / "experiment.json").touch()
    with RunLock(tmp_path, holder=EVALUATOR) as first, RunLock(tmp_path) as trainer:
        first.Acquire()
        assert find_held_lock(tmp_path) is None  # by a trainer
        trainer.Acquire()
        assert find_held_lock(tmp_path) == LOCK_FILE
        with RunLock(tmp_path, holder=EVALUATOR) as second, pytest.raises(RunLockError) as e:
            second.Acquire()
        who = f"another evaluator (--mode=eval) is at work there (process {os.getpid()} on "
        assert str(e.value).startswith(f"--logdir={tmp_path}: {who}")
        assert [is_lock_file(name) for name in sorted(os.listdir(tmp_path))] == [True, True, False]
    with RunLock(tmp_path, holder=EVALUATOR) as second:
        second.Acquire()
    assert sorted(os.listdir(tmp_path)) == [LOCK_FILE, "experiment.json"]


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("letters")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).symlink_to("../precious")
    with RunLock(tmp_path / "run") as lock, pytest.raises(OSError, match=LOCK_FILE):
        lock.Acquire()
    assert (tmp_path / "precious").read_text() == "letters"


def test_what_the_file_says_may_be_damaged(tmp_path):
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.Acquire()
        for content in ("", "5", '{"pid": 1', "\xff", "[" * 200_000):
            (tmp_path / LOCK_FILE).write_text(content)
            with pytest.raises(RunLockError, match="at work there; wait"):
                second.Acquire()
    (tmp_path / LOCK_FILE).write_text("x" * 9999)
    with RunLock(tmp_path) as lock:
        lock.Acquire()
        assert json.loads((tmp_path / LOCK_FILE).read_bytes())["pid"] == os.getpid()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capfd):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with RunLock(tmp_path) as lock:
        lock.Acquire()
    (tmp_path / LOCK_FILE).touch()
    assert find_held_lock(tmp_path) is None
    said = capfd.readouterr().err
    assert f"warning: --logdir={tmp_path}: its file system has no locks (Function not" in said


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_lock_that_fails_is_an_error(tmp_path, monkeypatch, number):
    """A second trainer could run if there were no lock."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", fail)
    with RunLock(tmp_path / "run") as lock:
        with pytest.raises(OSError, match=LOCK_FILE) as e:
            lock.Acquire()
        assert e.value.errno == number
        if number != errno.ESTALE:  # the file was removed meanwhile
            with pytest.raises(OSError, match=LOCK_FILE):
                find_held_lock(tmp_path / "run")
