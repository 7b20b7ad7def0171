"""Writes the programs and batches of training runs to files, for a GPU machine that has no TensorFlow.

    python -m benchmarks.gpu.runs --model=mt.M4Small --data_dir=CORPUS --batches=1000 --output=PROGRAMS

On that machine `python -m benchmarks.gpu.train --programs=PROGRAMS` trains. Nothing is run here.
"""

import io
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.layer import MANIFEST, VERSION
from benchmarks.gpu.train import BATCHES, HELD_OUT, INIT, SCORE, STEP
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from lingvo_moe.training.flags import define_experiment_flag
from tools import _cli


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.gpu.runs", __doc__)
    define_experiment_flag(flags, "experiment, e.g. mt.M4Small")
    flags.DEFINE_override()
    flags.DEFINE_path("data_dir", "", "its data; '' makes up batches, and no held-out ones")
    flags.DEFINE_integer("batches", 100, "batches to train on; all held-out ones", checks.SIZE)
    flags.DEFINE_path("output", None, "the directory to write to", required=True)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("runs", lambda: write(args))


def write(args: Flags) -> int:
    """Lowers the programs, packs the batches, and writes the manifest last. Returns the exit status, 0."""
    _cli.load_tensorflow()
    from lingvo_moe.core.config import registry
    from lingvo_moe.core.console.waiting import LineProgress
    from lingvo_moe.core.engine.loop.steps import held_out_step, initial_step, train_step
    from lingvo_moe.core.engine.lowering.lowering import lower_step
    from lingvo_moe.core.sharding import Mesh
    from lingvo_moe.core.task import inspect

    params = registry.GetParams(args.model, args.model_params_override)
    directory = Path(args.output)
    _cli.check_output_directory(directory)
    if args.data_dir:
        params.input.data_dir = str(args.data_dir)
    task, inputs = params.task.Instantiate(), params.input.Instantiate()
    task.CheckInput(params.task, params.input)
    held_out: list[Any] = []
    if args.data_dir:
        with LineProgress() as show:
            inputs.Prepare(show)
        batches: Iterable[Any] = itertools.islice(iter(inputs), args.batches)
        held_out = [one.batch for one in inputs.HeldOut()]
    else:
        random = np.random.RandomState(0)
        batches = (task.SampleBatch(inputs, random) for _ in range(args.batches))
    (directory / MANIFEST).unlink(missing_ok=True)
    programs = {
        INIT: initial_step(task),
        STEP: train_step(task, inputs, params.train.num_micro_batches),
        SCORE: held_out_step(task, inputs, average=False),
    }
    axes = Mesh.parse(params.train.mesh).axis_names
    for name, step in programs.items():
        lower_step(step, Mesh(axes, (1,) * len(axes))).Save(str(directory / name))
        print(f"wrote {name}", flush=True)
    _write_batches(directory / BATCHES, batches)
    if held_out:
        _write_batches(directory / HELD_OUT, held_out)
    manifest = {
        "version": VERSION,
        "model": args.model,
        "override": args.model_params_override,
        "held_out": len(held_out),
        "unit": task.UNIT,
        "loss": task.HELD_OUT_METRICS[0],
        "decay_share": _decay_share(task.optimizer.learning_rate),
        "parameters": inspect.count_parameters(task.VariableSpecs().Flatten()),
        "flops": task.Costs().StepFlops(inputs.BatchSpec()),
    }
    files.write_json(directory / MANIFEST, manifest)
    return 0


def _decay_share(schedule: Any) -> float:
    """The last part of a run in which its rate follows from where it ends; 0 where that changes nothing, 1 for all."""
    if not schedule.ends_with_run:
        return 0.0
    return float(schedule.p.Get("decay_share")) if "decay_share" in schedule.p else 1.0


def _write_batches(path: Path, batches: Iterable[Any]) -> None:
    """Writes batches one upon the other, in the smallest integers that hold them."""
    rows = [dict(batch.FlattenItems()) for batch in batches]
    stacked: dict[str, Any] = {}
    for name, first in rows[0].items():
        values = np.stack([row[name] for row in rows])
        if np.issubdtype(first.dtype, np.integer) and values.min() >= 0:
            values = values.astype(np.min_scalar_type(int(values.max())))
        stacked[name] = values
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **stacked)
    files.write_atomic(path, buffer.getvalue())


if __name__ == "__main__":
    _cli.run(main)
