"""Complete runs of the trainer: equal on every number of devices, killed, stopped, resumed and damaged.

Each program is compiled once: eight devices in this process, the disk cache for others.
"""

import json
import os
import random
import re
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest
import trainer_testing
from processes import free_address, start_python
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
from trainer_testing import flags, fork, losses, state

from lingvo_moe import trainer
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.compiled_cache import enable_compilation_cache
from lingvo_moe.core.engine.loop.summaries import read_metrics
from lingvo_moe.core.runs.goodput import WASTED, account, read_segments
from lingvo_moe.core.runs.time_record import RESTORE, SAVE, STARTUP, STEP
from lingvo_moe.reproduction import expert_comparison

pytestmark = pytest.mark.slow

STEPS = 18


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return trainer_testing.write_corpus(tmp_path_factory.mktemp("runs") / "data")


@pytest.fixture(scope="module", autouse=True)
def _shared(tmp_path_factory):
    """One cache of vocabularies and compiled programs for all processes of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        enable_compilation_cache()
        from lingvo_moe.core.engine import engines

        patch.setattr(engines, "make_engine", engines.make_engine)  # put back at the end
        trainer_testing.keep_compiled()
        yield


@pytest.fixture(scope="module")
def reference(data_dir, tmp_path_factory) -> Path:
    """An undisturbed run of 18 steps over eight devices."""
    run = tmp_path_factory.mktemp("runs") / "reference"
    assert trainer.main(flags(data_dir, run, STEPS)) == 0
    return run


def _start(plan, *args):
    # A test before this one may have asked this process for devices, which takes that flag away.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    command = trainer_testing.__file__, json.dumps(plan), *args
    return start_python(*command, env={"XLA_FLAGS": flags})


# --- one run


def test_the_run_learns_and_is_saved(reference):
    loss = losses(reference)
    assert list(loss) == list(range(1, STEPS + 1))
    assert np.mean([loss[s] for s in range(16, 19)]) < 0.8 * loss[1]
    saved = sorted(int(p.name) for p in (reference / "checkpoints").iterdir())
    assert saved == [0, 6, 12, 18]
    held = {p.name for p in reference.iterdir()} - {".trainer.lock"}
    described = {"experiment.json", "experiment.hmac", "manifest.sha256", "params.txt", "vocab"}
    assert held == described | {
        "checkpoints",
        "program.json",
        "time.jsonl",
        "train",
        "train_params.txt",
    }  # no machine code


def test_the_step_holds_the_all_to_alls_and_gathers_nothing(reference):
    """2 MoE layers x (dispatch + combine) x (forward, backward)."""
    counts = json.loads((reference / "program.json").read_text())["collectives"]
    assert counts["all-to-all"] == 8
    assert set(counts) == {"all-to-all", "all-reduce"}


def test_tensorboard_shows_what_is_asked_of_it(reference):
    events = EventAccumulator(str(reference / "train"), size_guidance={"tensors": 0}).Reload()
    tags = set(events.Tags()["tensors"])
    plain = "loss nll aux_loss accuracy grad_norm learning_rate skipped tokens tokens_per_second input_wait"
    layer = (
        "over_capacity_1_ratio over_capacity_2_ratio dispatch_0 dispatch_1 dispatch_2 "
        "over_capacity_ratio experts_per_token dead_experts gate_entropy effective_capacity loss_load_balance "
        "expert_load expert_load_max_over_mean expert_load_entropy importance importance_max_over_mean"
    )
    wanted = {*plain.split(), "params"}
    wanted |= {f"moe/{side}/{m}/layer_1" for side in ("encoder", "decoder") for m in layer.split()}
    assert wanted <= tags, sorted(wanted - tags)

    def value(tag):
        return tensor_util.make_ndarray(events.Tensors(tag)[-1].tensor_proto)

    dispatched = sum(value(f"moe/encoder/dispatch_{n}/layer_1") for n in range(3))
    np.testing.assert_allclose(dispatched, 1.0, rtol=1e-5)
    # 8 x 24 tokens in 8 groups of S = 24; C = 2 S / E = 6 slots; E C / S = 2.
    assert value("moe/decoder/effective_capacity/layer_1") == 2.0
    assert value("moe/encoder/expert_load/layer_1")[:, 2].sum() == 8  # a histogram of 8 experts
    assert value("tokens_per_second") > 0 and value("skipped") == 0
    routing = expert_comparison.routing(read_metrics(str(reference / "train")))
    assert {"dropped", "without_expert"} < set(routing) and routing["imbalance"] >= 1


# --- equal on other devices


def _line(run, max_steps, *more):
    """The flags of a task that compiles in no time, and whose loss stays far above the rounding of its numbers."""
    rate = "task.optimizer.learning_rate"
    override = f"train.summary_interval_steps=1;{rate}.constant_steps=5;{rate}.multiplier=0.01"
    flags = [
        "--model=toy_task.Line",
        f"--logdir={run}",
        f"--max_steps={max_steps}",
    ]
    return [*flags, f"--model_params_override={override}", *more]


def test_two_processes_of_four_devices_stop_together(tmp_path):
    """A signal to one of them stops both at the same step; one process goes on from there. One device with TensorFlow's
    own kernels gives the same losses, from the beginning and from their checkpoint."""
    run, alone = tmp_path / "run", tmp_path / "alone"
    job = [
        "--mesh=data:8",
        "--num_devices=4",
        "--num_processes=2",
        f"--coordinator_address={free_address()}",
    ]
    plans = [None], [(signal.SIGTERM, 4, 0.0)]
    workers = [
        _start(plan, *_line(run, 100_000, *job, f"--process_id={i}"))
        for i, plan in enumerate(plans)
    ]
    try:
        outputs = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    saved = set()
    for out, err in outputs:
        assert "exit 143" in out, err
        saved |= set(re.findall(r"stopped and saved at step (\d+); the same command goes on", err))
    assert len(saved) == 1
    shows_steps = [bool(re.search(r"^step \d+/", err, re.M)) for _, err in outputs]
    assert shows_steps == [True, False]
    last = int(saved.pop())
    assert list(losses(run)) == list(range(1, last + 1))
    assert trainer.main(_line(run, last + 2, "--mesh=data:8")) == 0
    for logdir in (alone, run):
        assert trainer.main(_line(logdir, last + 4, "--engine=tf_graph")) == 0
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)


# --- stopped, killed, damaged


def test_stopped_and_killed_it_ends_bit_equal(reference, data_dir, tmp_path):
    """SIGTERM after step 4; resumed, killed (-9) some time after step 8, and resumed again."""
    delay = random.uniform(0.0, 0.4)
    run = fork(reference, tmp_path / "run", 0)
    plan = [(signal.SIGTERM, 4, 0.0), (signal.SIGKILL, 8, delay)]
    child = _start(plan, *flags(data_dir, run, STEPS))
    out, err = child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL, err
    assert out == "exit 143\n"
    assert "SIGTERM: stopping after this step and saving" in err
    assert "stopped and saved at step 4; the same command goes on from there" in err
    assert "resuming at step 4" in err
    saved = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
    assert 4 <= saved < STEPS  # step 6 may still have been on its way
    assert trainer.main(flags(data_dir, run, STEPS)) == 0
    assert losses(run) == losses(reference), f"killed {delay} s after step 8"
    wanted, got = state(reference), state(run)
    assert list(got) == list(wanted)
    for path, value in wanted.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)
    # Where the time of its three commands went, the killed one's steps after `saved` included.
    segments, damaged = read_segments(run / "time.jsonl")
    found = account(segments)
    ends = [s.began + s.elapsed for s in segments]
    assert (damaged, found.segments, found.disruptions) == (0, 3, 2)
    assert [s.status for s in segments] == [143, None, 0]
    assert [(s.first, s.last) for s in segments] == [(0, 4), (4, segments[1].last), (saved, STEPS)]
    assert found.max_productive_step == STEPS and (found.seconds[WASTED] > 0) == (
        segments[1].last > saved
    )
    assert found.total == pytest.approx(ends[-1] - segments[0].began, abs=0.01)
    assert min(found.seconds[kind] for kind in (STEP, STARTUP, RESTORE, SAVE)) > 0


def test_a_damaged_checkpoint_is_an_error_and_is_left_as_it_is(
    reference, data_dir, tmp_path, capfd
):
    run = fork(reference, tmp_path / "run", 6, 12)
    # All files: a single one may contain only data that later steps replaced.
    for file in (run / "checkpoints/12/state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    def contents():
        files = (p for p in (run / "checkpoints").rglob("*") if p.is_file())
        return {p: p.read_bytes() for p in files}

    before = contents()
    assert trainer.main(flags(data_dir, run, STEPS)) == 2
    (line,) = capfd.readouterr().err.splitlines()[-1:]
    assert line.startswith(f"error: {run / 'checkpoints'}, step 12: the checkpoint is damaged")
    assert "/12 to go on from step 6" in line
    assert contents() == before
    assert losses(run) == {}


def test_other_data_under_a_run_is_an_error(reference, data_dir, tmp_path, capfd):
    run = fork(reference, tmp_path / "run", 6)
    other = trainer_testing.write_corpus(tmp_path / "other")
    with open(other / "aa.tsv", "a", encoding="utf-8") as file:
        file.write("one more\tone more\n")
    assert trainer.main(flags(other, run, STEPS)) == 2
    err = capfd.readouterr().err
    assert "the saved position of the input is of other data" in err
    # The command that it proposes begins another run with the weights of this one.
    proposed = err.partition("another run with its weights: python -m lingvo_moe.trainer ")[2]
    assert trainer.main(shlex.split(proposed)) == 0
    assert f"began from {run} at step 6" in capfd.readouterr().err
    assert max(losses(tmp_path / "run-2")) == STEPS


# --- begun from another run


def test_a_run_begins_with_the_weights_of_another(
    reference, data_dir, tmp_path, capfd, monkeypatch
):
    """Stopped before its first checkpoint it starts again; after that it resumes like any other."""
    run = tmp_path / "run"
    begin = [f"--init_from={reference}", "--init_from_step=12"]
    with monkeypatch.context() as patch:

        def stop(*_):
            raise KeyboardInterrupt

        patch.setattr(Checkpointer, "Save", stop)
        assert trainer.main(flags(data_dir, run, 2, *begin)) == 130
    assert not list((run / "checkpoints").iterdir())
    assert trainer.main(flags(data_dir, run, 2, *begin)) == 0
    said = capfd.readouterr().err
    assert f"began from {reference} at step 12; 400 of 400 source pieces, 300 of 300 target" in said
    began = json.loads((run / "experiment.json").read_text())["began_from"]
    assert (began["logdir"], began["step"]) == (str(reference), 12)
    events = EventAccumulator(str(run / "train"), size_guidance={"tensors": 0}).Reload()
    assert "began_from" in events.Tags()["tensors"]
    at_12 = state(fork(reference, tmp_path / "at 12", 12))
    at_0 = state(fork(run, tmp_path / "at 0", 0))
    for path, value in at_12.items():
        if path.startswith("theta."):
            np.testing.assert_array_equal(at_0[path], value, err_msg=path)
    assert at_0["step"] == 0 and at_12["step"] == 12
    assert not any(value.any() for path, value in at_0.items() if path.startswith("slots."))
    assert losses(run)[1] < 0.8 * losses(reference)[1]
    itself = flags(data_dir, run, 30, f"--init_from={run}", "--restart")
    assert trainer_testing.status(*itself) == 2
    assert f"--init_from={run} is --logdir itself" in capfd.readouterr().err
    # The same command resumes; another --init_from is refused, also for a run that began without one.
    assert trainer.main(flags(data_dir, run, 3, *begin)) == 0
    assert "resuming at step 2" in capfd.readouterr().err
    for logdir, other in ((run, f"--init_from={tmp_path}"), (reference, f"--init_from={run}")):
        assert trainer.main(flags(data_dir, logdir, 30, other)) == 2
        said = capfd.readouterr().err
        how = f"{reference} at step 12" if logdir == run else "nothing"
        assert f"the run in {logdir} began from {how}, and has trained since" in said
