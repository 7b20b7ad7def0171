"""Runs of the trainer for tests: a corpus, one compilation for many runs, and signals at given steps.

Also a command, `python trainer_testing.py PLAN FLAG...`: PLAN is a JSON list with an entry for each run in this
process, null or [signal, step, seconds after it]; prints `exit CODE` after each.
"""

import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lingvo_moe.core.console.tensorflow_import import import_tensorflow
from lingvo_moe.core.engine.loop.progress import StepProgress

SAVE_EVERY = 6
OVERRIDE = ";".join(
    (
        f"train.save_interval_steps={SAVE_EVERY}",
        "train.save_max_to_keep=100",
        "train.summary_interval_steps=1",
        "task.attention_dropout=0.1",
        "task.repeat=False",  # without loops it is traced and compiled in half the time
        "task.optimizer=sgd",
        "task.optimizer.learning_rate=constant",
        "task.optimizer.learning_rate.value=0.5",
    )
)


def status(*flags: str) -> int | str | None:
    """Runs the trainer in this process and returns its exit status, also if it ends while it reads flags."""
    from lingvo_moe import trainer

    try:
        return trainer.main(flags)
    except SystemExit as e:
        return e.code


def in_this_process(command: list[str], check: bool) -> None:
    """Stands in for subprocess.run where commands start the trainer, whose own process takes long to begin."""
    from lingvo_moe import trainer

    assert command[1:3] == ["-m", "lingvo_moe.trainer"] and check
    assert trainer.main(command[3:]) == 0


def write_corpus(
    directory: Path,
    sizes: Mapping[str, int] = {"aa": 400, "bb": 150, "cc": 50},
    words_of_a_pair: tuple[int, int] = (1, 6),
    held_out: int = 0,
) -> Path:
    """Writes files of so many pairs: words spelled backwards, preceded by the first letter of the file's name.

    The first `held_out` pairs of every file but the last stand in dev/ too.
    """
    rng = random.Random(0)
    syllables = [c + v for c in "bdfgklmnprst" for v in ("a", "e", "i", "o", "u", "an")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(300)]
    for name, size in sizes.items():
        pairs = []
        for _ in range(size):
            english = rng.choices(words, k=rng.randint(*words_of_a_pair))
            source = " ".join(Path(name).stem[0] + word[::-1] for word in english)
            pairs.append(f"{source}\t{' '.join(english)}\n")
        for_dev = pairs[:held_out] if name != [*sizes][-1] else []
        for file, lines in {directory / name: pairs, directory / "dev" / name: for_dev}.items():
            if lines:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.with_suffix(".tsv").write_text("".join(lines), "utf-8")
    return directory


def flags(data_dir: Path, logdir: Path, max_steps: int, *more: str) -> list[str]:
    """The flags of mt.M4Tiny with random routing, and little else that takes long to trace."""
    return [
        "--model=mt.M4Tiny",
        f"--data_dir={data_dir}",
        f"--logdir={logdir}",
        f"--max_steps={max_steps}",
        f"--model_params_override={OVERRIDE}",
        *more,
    ]


def keep_compiled() -> None:
    """Makes the trainers of this process compile each function once for an engine and mesh."""

    from lingvo_moe.core.engine import engines

    make_engine, engines_made = engines.make_engine, dict[Any, Any]()

    def make_once(name: str, mesh: Any, known_faults: str = "error") -> Any:
        key = (name, str(mesh), known_faults)
        if key not in engines_made:
            engine, built = make_engine(name, mesh, known_faults), {}
            build = engine.BuildStep

            def build_once(step: Any) -> Any:
                if step.name not in built:
                    built[step.name] = build(step)
                return built[step.name]

            engine.BuildStep = build_once
            engines_made[key] = engine
        return engines_made[key]

    engines.make_engine = make_once


def once_without_compiling(engine: Any, step: Any, *args: Any) -> Any:
    """Stands in for an engine's Once: TensorFlow's own kernels compute what is called once, operation by operation."""
    from lingvo_moe.core.engine import engines
    from lingvo_moe.core.sharding import single_device

    plain = engines.make_engine("tf_graph", single_device())
    return engine.Put(plain.Get(plain.Once(step, *args)), step.results)


def fork(run: Path, to: Path, *steps: int) -> Path:
    """Copies a run as it was when these checkpoints were its only ones."""
    shutil.copytree(run / "vocab", to / "vocab")
    for name in ("experiment.json", "params.txt", "manifest.sha256"):
        shutil.copy(run / name, to)
    for step in steps:
        shutil.copytree(run / "checkpoints" / str(step), to / "checkpoints" / str(step))
    return to


def losses(run: Path) -> dict[int, float]:
    """Returns the exact losses by step."""
    from lingvo_moe.core.engine.loop.summaries import read_metrics

    return {row["step"]: row["loss"] for row in read_metrics(str(run / "train"))}


def state(run: Path) -> dict[str, Any]:
    """Returns the newest checkpoint, by path."""
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer

    with Checkpointer(str(run / "checkpoints"), read_only=True) as checkpointer:
        return dict(checkpointer.RestoreToNumpy()[0].FlattenItems())


_update = StepProgress.Update


def _signal_at(number: int, at: int, delay: float) -> None:
    """Sends this process a signal `delay` seconds after step `at`, or none for number 0."""

    def update(self: StepProgress, step: int, *args: Any) -> float:
        rate = _update(self, step, *args)
        if number and step == at:
            threading.Timer(delay, os.kill, [os.getpid(), number]).start()
            time.sleep(0.0 if delay else 0.5)
        return rate

    StepProgress.Update = update


def _spoil_rows_of_others() -> None:
    """Lets batches of toy_task have NaN in the rows that this process does not need."""
    import numpy as np
    import toy_task

    make = toy_task._Batches.__next__

    def own_rows(self: toy_task._Batches) -> Any:
        batch = make(self)
        batch.x[[row not in self.rows for row in range(len(batch.x))]] = np.nan
        return batch

    toy_task._Batches.__next__ = own_rows


def main() -> None:
    import_tensorflow(pool=True)
    keep_compiled()
    _spoil_rows_of_others()
    from lingvo_moe import trainer

    for plan in json.loads(sys.argv[1]):
        _signal_at(*(plan or (0, 0, 0.0)))
        print("exit", trainer.main(sys.argv[2:]), flush=True)


if __name__ == "__main__":
    main()
