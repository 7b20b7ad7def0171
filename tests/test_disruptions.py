"""A run that is killed, stopped and restarted at random, also on other layouts, has the losses of a calm one."""

import atexit
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import free_address, run_python

from lingvo_moe.core.runs.goodput import account, read_segments
from lingvo_moe.core.runs.run_dir import RunDir

_ROUNDS = 6
_FIRST, _OTHERS = (1, 2), [(1, 1), (2, 1)]  # processes of a job, and the devices of each


@pytest.mark.slow
def test_six_disruptions(tmp_path):
    program = f"import test_disruptions; test_disruptions.disturb({str(tmp_path)!r})"
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()[-4000:]
    first_layout = int(done.stdout)
    rows = list(_losses(tmp_path / "disturbed"))
    expected = dict(_losses(tmp_path / "undisturbed"))
    assert dict(rows).keys() == expected.keys() and len(rows) > len(expected) > first_layout > 10
    assert min(expected.values()) > 1e-3  # far from the optimum, where losses say nothing
    for step, loss in rows:  # those of steps that a restart did again, too
        same = step <= first_layout
        assert loss == (expected[step] if same else pytest.approx(expected[step], rel=1e-5))
    segments, _ = read_segments(tmp_path / "disturbed" / "time.jsonl")
    assert account(segments).disruptions == _ROUNDS


def disturb(directory: str) -> None:
    """Trains `disturbed`, with the disruptions, and `undisturbed` to the same step; prints the last step on one layout.

    The trainers are forked from this process, so that they need not import anything.
    """
    from lingvo_moe.core.console.tensorflow_import import import_tensorflow

    import_tensorflow()
    import toy_task  # noqa: F401

    from lingvo_moe import trainer  # noqa: F401
    from lingvo_moe.core.engine import pjrt  # noqa: F401
    from lingvo_moe.core.engine.checkpoints import checkpoints  # noqa: F401
    from lingvo_moe.core.engine.loop import train_loop  # noqa: F401
    from lingvo_moe.core.engine.lowering import lowering  # noqa: F401

    run, rng = Path(directory, "disturbed"), random.Random(3)
    layout, first_layout = _FIRST, 0
    for number in range(_ROUNDS):
        if number >= _ROUNDS * 2 // 3:
            first_layout = first_layout or RunDir(run).steps[-1]
            layout = rng.choice(_OTHERS)
        processes = _start(layout, run, max_steps=10**9)
        _interrupt(processes, run, steps=rng.randint(3, 12), seconds=rng.random() / 10, rng=rng)
    end = _last_step(run) + 5
    assert _statuses(_start(layout, run, end)) == {0}
    assert _statuses(_start(_FIRST, run.with_name("undisturbed"), end)) == {0}
    print(first_layout)


def _interrupt(
    processes: list[int], run: Path, *, steps: int, seconds: float, rng: random.Random
) -> None:
    """Sends SIGKILL or SIGTERM to a process of a job that has done so many steps; all have ended afterwards."""
    begin = _last_step(run)
    while _last_step(run) < begin + steps:
        assert os.waitpid(processes[0], os.WNOHANG)[0] == 0, "the trainer ended by itself"
        time.sleep(0.01)
    time.sleep(seconds)
    number = rng.choice([signal.SIGKILL, signal.SIGTERM])
    os.kill(rng.choice(processes), number)
    if number == signal.SIGTERM:  # announced: the job saves its last step
        assert _statuses(processes) == {128 + number}
        assert RunDir(run).steps[-1] == _last_step(run)
    else:
        for process in processes:
            os.kill(process, number)
        _statuses(processes)


def _start(layout: tuple[int, int], run: Path, max_steps: int) -> list[int]:
    """Starts the processes of a job, on this machine's virtual devices; returns their numbers."""
    from lingvo_moe import trainer

    num_processes, num_devices = layout
    override = "task.optimizer=sgd;task.optimizer.learning_rate=constant;train.mesh=data:2;"
    override += "task.optimizer.learning_rate.value=0.001;"
    override += "train.save_interval_steps=5;train.summary_interval_steps=1"
    flags = ["--model=toy_task.Line", f"--logdir={run}", f"--max_steps={max_steps}"]
    flags += [f"--num_devices={num_devices}", f"--model_params_override={override}"]
    if num_processes > 1:
        flags += [f"--coordinator_address={free_address()}", f"--num_processes={num_processes}"]
    processes = []
    for i in range(num_processes):
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a new process
            with open(run.with_name("log"), "ab") as log:
                for number in (1, 2):
                    os.dup2(log.fileno(), number)
            status = trainer.main(flags + [f"--process_id={i}"] * (num_processes > 1))
            atexit._run_exitfuncs()  # JAX's: processes of a job leave it together
            os._exit(status)
        processes.append(process)
    return processes


def _statuses(processes: list[int]) -> set[int]:
    """Waits for the end of these processes and returns their statuses."""
    return {os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes}


def _losses(run: Path) -> Iterator[tuple[int, float]]:
    """The steps and losses of a run, in the order in which they were done."""
    file = run / "train" / "metrics.jsonl"
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # the line that a killed process was writing
            continue
        yield row["step"], row["loss"]


def _last_step(run: Path) -> int:
    return max((step for step, _ in _losses(run)), default=0)
