"""--elastic: when a process is killed, the others go on without a restart, with the losses of an undisturbed run."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from processes import free_address, start_python
from trainer_testing import losses

from lingvo_moe import trainer
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.task.meshes import largest_mesh
from lingvo_moe.training.flags import parse_flags

pytestmark = pytest.mark.slow


def _flags(run, steps, *more):
    override = "train.summary_interval_steps=1;train.save_interval_steps=5;input.batch_size=12"
    given = ["--model=toy_task.Line", f"--logdir={run}", f"--max_steps={steps}"]
    return [*given, f"--model_params_override={override};train.mesh=data:3", *more]


def _start(run: Path, count: int, steps: int, log: Path) -> list[subprocess.Popen]:
    more = ["--num_devices=1", "--elastic", f"--num_processes={count}"]
    flags = _flags(run, steps, *more, f"--coordinator_address={free_address()}")
    command = ("-m", "lingvo_moe.trainer", *flags)
    with open(log, "ab") as out:
        return [
            start_python(*command, f"--process_id={i}", stdout=out, stderr=out)
            for i in range(count)
        ]


def _await_step(run: Path, step: int, processes: list[subprocess.Popen], said: Path) -> None:
    while max(losses(run), default=0) < step:
        ended = [process.poll() for process in processes]
        assert None in ended, said.read_text()
        time.sleep(0.05)


def test_the_others_go_on_when_one_is_killed(tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    processes = _start(run, 3, 10**6, log)
    try:
        _await_step(run, 8, processes, log)
        processes[2].send_signal(signal.SIGKILL)
        time.sleep(1)
        _await_step(run, max(losses(run)) + 10, processes[:2], log)
        processes[1].terminate()
        assert [process.wait(60) for process in processes[:2]] == [143, 143], log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = log.read_text()
    assert re.search(r"^process 2 on .*, at step [0-9]+: has not answered for (5|10) s", said, re.M)
    assert "going on with 2 of 3 processes, mesh data:2, from the newest checkpoint" in said
    found = losses(run)
    last = RunDir(run).steps[-1]
    assert trainer.main(_flags(tmp_path / "alone", last, "--num_devices=1")) == 0
    assert found == pytest.approx(losses(tmp_path / "alone"), rel=1e-5) and len(found) == last


def test_the_largest_mesh_that_divides_is_taken(tmp_path):
    more = ["--elastic", "--num_processes=5", "--process_id=0", "--coordinator_address=x:1"]
    args = parse_flags(_flags(tmp_path, 1, *more))
    params = trainer.registry.GetParams(args.model, args.model_params_override)

    def largest(*devices: int) -> tuple[int, str]:
        count, mesh = largest_mesh(params, "", args.mesh, *devices)
        return count, str(mesh)

    assert largest(5, 1) == (4, "data:4")
    assert largest(5, 2) == (3, "data:6")
    assert largest(2, 1) == (2, "data:2") and largest(1, 1) == (1, "data:1")
