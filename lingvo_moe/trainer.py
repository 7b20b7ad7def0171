"""The one entry point for jobs: flags -> registry -> engine.

python -m lingvo_moe.trainer --model=mt.M4Demo --data_dir=DIR --logdir=RUN --num_devices=8
python -m lingvo_moe.trainer --model=mt.M4MoE2048E36L --mode=inspect_model
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from lingvo_moe.core import registry
from lingvo_moe.core.engine.base import ENGINES
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.core.suggest import did_you_mean

MODES = ("sync", "inspect_model", "inspect_params")


class UsageError(ValueError):
    """Flags that do not go together."""


def make_parser() -> argparse.ArgumentParser:
    """The flags, with help that suffices."""
    parser = argparse.ArgumentParser(
        prog="python -m lingvo_moe.trainer",
        description="Trains or inspects a registered experiment.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="experiment, e.g. mt.M4Demo or mt.M4MoE2048E36L")
    add("--mode", default="sync", help=f"one of {', '.join(MODES)}: train (and resume), or print")
    add("--logdir", default="", help="directory of the run: checkpoints, summaries, vocabularies")
    add("--data_dir", default="", help="directory of <lang>.tsv[.gz] files; see docs/data.md")
    add("--engine", default="pjrt", help=f"one of {', '.join(ENGINES)}")
    add(
        "--num_devices",
        type=int,
        default=0,
        help="virtual CPU devices of this process; 0: all there are",
    )
    add("--mesh", default="", help="axis:size,...; default: one axis, 'expert', over all devices")
    add("--max_steps", type=int, default=None, help="shorthand for train.max_steps")
    add(
        "--model_params_override",
        default="",
        help="path=value;path=value, e.g. task.num_experts=16",
    )
    add(
        "--restart",
        action="store_true",
        help="begin at step 0 although --logdir holds a run, which is moved aside",
    )
    add("--coordinator_address", default="", help="host:port of process 0, for several processes")
    add("--num_processes", type=int, default=1, help="processes of this job")
    add("--process_id", type=int, default=0, help="this process, from 0")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job; returns the exit status: 0 done, 2 a mistake in flags or data, 128 + n stopped by signal n."""
    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """As main, without turning errors into messages."""
    if args.mode not in MODES:
        raise UsageError(f"--mode={args.mode}: no such mode{did_you_mean(args.mode, MODES)}")
    override = full_override(args)
    params = registry.GetParams(args.model, override)
    if args.mode == "inspect_params":
        print(params.ToText(), end="")
        return 0
    if args.mode == "inspect_model":
        from lingvo_moe.core import inspect

        task = params.task.Instantiate()
        mesh = Mesh.parse(args.mesh) if args.mesh else _planned_mesh(params, args.num_devices)
        inspect.print_variables(task.VariableSpecs().Flatten(), mesh)
        return 0
    if not args.logdir:
        raise UsageError("--logdir is needed to train: the directory of the run")
    return train(args, params, override)


def full_override(args: argparse.Namespace) -> str:
    """`--model_params_override` with the shorthand flags appended."""
    parts = [args.model_params_override] if args.model_params_override else []
    if args.max_steps is not None:
        parts.append(f"train.max_steps={args.max_steps}")
    if args.data_dir:
        parts.append(f"input.data_dir={os.path.abspath(args.data_dir)}")
    return ";".join(parts)


def _planned_mesh(params: Any, num_devices: int) -> Mesh:
    """The mesh that an experiment was made for: a group a device, or as many devices as are asked for."""
    return Mesh(("expert",), (num_devices or max(params.task.num_groups, 1),))


def train(args: argparse.Namespace, params: Any, override: str) -> int:
    """Mode sync: trains until the end, or until stopped; goes on where the run in --logdir stands."""
    # Imported here, since inspecting a model should not wait for them.
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.engine.base import make_engine
    from lingvo_moe.core.engine.checkpoints import Checkpointer
    from lingvo_moe.core.engine.specs import TensorSpec
    from lingvo_moe.core.engine.summaries import Summaries, read_metrics
    from lingvo_moe.core.engine.train_loop import TrainLoop
    from lingvo_moe.tasks.mt.run_dir import RunDir

    if args.num_devices and args.engine == "pjrt":
        devices.request_cpu_devices(args.num_devices)
    if args.num_processes > 1:
        devices.initialize_distributed(
            args.coordinator_address, args.num_processes, args.process_id
        )
    first_process = args.process_id == 0
    mesh = make_mesh(args.mesh, args.engine)
    engine = make_engine(args.engine, mesh)
    task = params.task.Instantiate()
    check_divisible(params, task, mesh)

    run_dir = RunDir(args.logdir)
    if first_process:
        prepare_run_dir(run_dir, args.model, override, restart=args.restart)
    inputs = params.input.Instantiate()
    if first_process:
        inputs.Prepare(progress=log)
        if not run_dir.exists:
            run_dir.Write(args.model, override, inputs.vocabs.Transform(lambda v: v.model_bytes))
    devices.sync_processes("prepared")
    if not first_process:
        inputs.Prepare()

    batch_specs = inputs.BatchSpec().Transform(
        lambda s: TensorSpec(s.shape, s.dtype, task.BatchSplit())
    )
    summary_dir = os.path.join(args.logdir, "train")
    summaries = Summaries(summary_dir, enabled=first_process)
    summaries.Text("params", params.ToText())
    checkpointer = Checkpointer(str(run_dir.checkpoint_dir), keep=params.train.save_max_to_keep)
    if checkpointer.LatestStep() is None and read_metrics(summary_dir):
        raise UsageError(
            f"--logdir={args.logdir} holds a run that has trained, but no checkpoint of it; "
            "--restart begins at step 0"
        )
    try:
        loop = TrainLoop(task, inputs, batch_specs, engine, checkpointer, summaries, params.train)
        result = loop.Run(on_compiled=lambda step: report_program(step, args.logdir, first_process))
    finally:
        summaries.Close()
        checkpointer.Close()
    return 128 + result.signal if result.signal else 0


def log(line: str) -> None:
    """Progress that is not a step's, to standard error."""
    print(line, file=sys.stderr, flush=True)


def make_mesh(text: str, engine: str) -> Mesh:
    """`--mesh`, or one axis over all devices of all processes."""
    if text:
        return Mesh.parse(text)
    if engine == "tf":
        return Mesh(("expert",), (1,))
    from lingvo_moe.core.engine import devices

    return Mesh(("expert",), (devices.device_count(),))


def report_program(step: Any, logdir: str, first_process: bool) -> None:
    """Says which collectives the compiled step holds, and keeps their counts in LOGDIR/collectives.json."""
    from lingvo_moe.core.engine.collectives import count_collectives

    if not first_process:
        return
    counts = count_collectives(step.HloText())
    with open(os.path.join(logdir, "collectives.json"), "w", encoding="utf-8") as file:
        json.dump(counts, file)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no collective"
    log(f"compiled the training step: {told}")


def check_divisible(params: Any, task: Any, mesh: Mesh) -> None:
    """Raises ShardingError where batch, groups or experts do not divide over the mesh, naming the parameter."""
    split = task.p.activation_split
    for letter, path, size in (
        ("B", "input.batch_size", params.input.batch_size),
        ("G", "task.num_groups", params.task.num_groups),
        ("E", "task.num_experts", params.task.num_experts),
    ):
        axis = split.get(letter)
        if axis is None or not size or mesh.size == 1:
            continue
        parts = mesh.axis_size(axis)
        if size % parts:
            raise ShardingError(
                f"{path}={size} does not divide over the {parts} devices of axis {axis!r} of mesh {mesh}; "
                f"use --mesh or --num_devices with a divisor of {size}, or --model_params_override='{path}=...'"
            )


def prepare_run_dir(run_dir: Any, model: str, override: str, restart: bool) -> None:
    """Makes sure that --logdir is free, or holds the very run that the flags describe.

    Raises:
        UsageError: it holds another experiment.
    """
    if restart and run_dir.path.exists():
        number = 1
        while (
            aside := run_dir.path.with_name(f"{run_dir.path.name}.before_restart_{number}")
        ).exists():
            number += 1
        run_dir.path.rename(aside)
        log(f"--restart: the run that was in {run_dir.path} is now in {aside}")
    if not run_dir.exists:
        return
    before = run_dir.experiment
    was, now = (
        registry.GetParams(m, o)
        for m, o in ((before["model"], before["params_override"]), (model, override))
    )
    # A run may be made longer, or saved more often; what is trained on what may not change under it.
    difference = was.task.TextDiff(now.task) + was.input.TextDiff(now.input)
    if before["model"] != model or difference:
        raise UsageError(
            f"--logdir={run_dir.path} holds a run of {before['model']} with other parameters; give another --logdir, "
            f"or --restart to begin anew. '>' is the run there, '<' are the flags:\n{difference}"
        )


if __name__ == "__main__":
    sys.exit(main())
