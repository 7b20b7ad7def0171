"""No other process writes into a run while its trainer lives: real processes, of one job and of two."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trainer_testing

from lingvo_moe import trainer
from lingvo_moe.core.engine.loop.train_loop import TrainLoop
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.directories import EXPORTED, OutputError, check_logdir, check_replaceable
from lingvo_moe.core.runs.run_lock import LOCK_FILE, RunLock
from tools import build_corpus, evaluate, export, train_vocab

# The trainer without its steps: it runs until it is killed.
_TRAINER = """
import sys, time
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
import_tensorflow()
from lingvo_moe.core.engine.loop.train_loop import TrainLoop

def work(self, on_compiled):
    print("at work", flush=True)
    time.sleep(1000)

TrainLoop.Run = work
from lingvo_moe import trainer
sys.exit(trainer.main(sys.argv[1:]))
"""

# A process of a job of two, until it has the lock of the run.
_JOB = """
import sys, time
from lingvo_moe import trainer
from lingvo_moe.core.engine import devices
from lingvo_moe.core.runs.run_lock import RunLock

args = trainer.parse_flags(sys.argv[1:])
devices.request_cpu_devices(1)
devices.initialize_distributed(args.coordinator_address, args.num_processes, args.process_id)
try:
    with RunLock(args.logdir) as lock:
        trainer.share_run(lock, lambda: None, lambda: None)
        print("at work", flush=True)
        time.sleep(1000)
except ValueError as e:
    print("error:", e, flush=True)
"""


def _start(program: str, *flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_mistyped_command_bars_no_directory(tmp_path, capfd):
    runs = tmp_path / "runs"
    runs.mkdir()
    for logdir in (runs, runs / "new"):
        flags = trainer_testing.flags(tmp_path / "no", logdir, 3, "--engine=tf_graph")
        assert trainer.main(flags) == 2
        assert f"--data_dir={tmp_path / 'no'} does not exist" in capfd.readouterr().err
        assert not os.listdir(runs)
    (runs / LOCK_FILE).touch()  # of a trainer that was killed
    check_logdir(runs / "new", {})


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A trainer at work in tmp/run: the process, the run, its flags."""
    tmp = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp / "cache"))
        run = tmp / "runs" / "run"
        flags = trainer_testing.flags(
            trainer_testing.write_corpus(tmp / "data"), run, 3, "--engine=tf_graph"
        )
        with _start(_TRAINER, *flags) as process:
            try:
                assert process.stdout.readline() == "at work\n"
                yield process, run, flags
            finally:
                process.kill()


@pytest.fixture
def untouched(live):
    """Checks that a test changes nothing in or around the run."""
    process, run, _ = live
    before = _contents(run.parent)
    yield
    assert _contents(run.parent) == before
    assert process.poll() is None


@pytest.mark.parametrize("more", [[], ["--restart"], ["--model_params_override=task.seed=5"]])
def test_a_second_trainer_is_refused(live, untouched, more, capfd, monkeypatch):
    process, run, flags = live
    monkeypatch.setattr(TrainLoop, "Run", lambda *_, **__: pytest.fail("it trains"))
    assert trainer.main([*flags, *more]) == 2
    said = capfd.readouterr().err
    assert (
        f"error: --logdir={run}: another trainer is at work there (process {process.pid} on" in said
    )


@pytest.mark.parametrize("place", [".", "checkpoints", "model", "checkpoints/0/new", ".."])
def test_an_export_into_it_is_refused(live, untouched, place, capfd):
    _, run, _ = live
    output = run / place
    assert export.main([f"--logdir={run}", f"--output={output}"]) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"export: --output={output} "), said
    with pytest.raises(OutputError):
        check_replaceable(output, EXPORTED)


def test_other_tools_write_nothing_that_is_the_trainer_s(live, untouched, capfd):
    _, run, flags = live
    data = f"--data_dir={flags[1].partition('=')[2]}"
    for tool, *argv in (
        (build_corpus, f"--output={run}"),
        (train_vocab, data, f"--output={run / 'vocab'}"),
        (evaluate, f"--logdir={run}", f"--output={run / 'checkpoints'}"),
    ):
        assert tool.main(argv) == 1
        assert f"--output={run}" in capfd.readouterr().err


def test_a_trainer_in_or_around_it_is_refused(live, untouched, capfd):
    _, run, flags = live
    for logdir in (run / "checkpoints", run.parent):
        others = [f for f in flags if not f.startswith("--logdir")]
        assert trainer.main([*others, f"--logdir={logdir}"]) == 2
        assert f"error: --logdir={logdir} " in capfd.readouterr().err


def test_two_jobs_of_two_processes(tmp_path):
    """The second job's process 1 names the live run although its process 0 does not."""
    run = tmp_path / "run"
    with contextlib.ExitStack() as stack:

        def start(*logdirs: Path) -> list[subprocess.Popen]:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                address = f"--coordinator_address=127.0.0.1:{s.getsockname()[1]}"
            job = []
            for number, logdir in enumerate(logdirs):
                flags = ["--model=mt.M4Tiny", f"--logdir={logdir}"]
                flags += ["--num_processes=2", f"--process_id={number}"]
                job.append(stack.enter_context(_start(_JOB, address, *flags)))
                stack.callback(job[-1].kill)
            return job

        first = start(run, run)
        for process in first:
            assert "at work\n" in iter(process.stdout.readline, "")  # after lines of Gloo's
        before = _contents(run)
        astray = start(tmp_path / "other", run)
        said = [process.communicate(timeout=300)[0] for process in astray]
        assert f"--logdir={run}: process 1 sees another directory there than process 0" in said[1]
        assert "process 1 of the job could not begin" in said[0]
        assert _contents(run) == before and set(os.listdir(tmp_path)) == {"run"}
        for process in first:
            process.kill()
            process.wait()
        with RunLock(run) as lock:
            lock.Acquire()


def test_after_a_kill_the_same_command_goes_on(live, capfd, monkeypatch):
    """The last test with the live run, which it ends."""
    process, run, flags = live
    process.kill()
    process.wait()
    monkeypatch.setattr(TrainLoop, "Run", lambda *_, **__: NestedMap(status=0, last_step=3))
    assert trainer.main(flags) == 0
    assert trainer.main(flags) == 0  # and lets go of it in the end
    assert (run / LOCK_FILE).exists()
