"""Checks flags, paths and the run directory of a job, so that mistakes are found before anything slow starts."""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import did_you_mean, either
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.flags import Flags, join_overrides
from lingvo_moe.core.engine.base import ONE_DEVICE_ENGINES
from lingvo_moe.core.files.paths import absolute, check_local
from lingvo_moe.core.files.store import check_place, is_address
from lingvo_moe.core.pipeline.params import micro_batches_of, schedule_on, settings_of
from lingvo_moe.core.pipeline.schedule import DATA, STAGE, ScheduleError
from lingvo_moe.core.runs.directories import check_addable, check_logdir, check_writable
from lingvo_moe.core.sharding import Axis, Mesh, ShardingError, SplitMap
from lingvo_moe.core.sharding.letters import axes_of
from lingvo_moe.core.strategies.strategy_file import read_overrides

if TYPE_CHECKING:  # they import TensorFlow
    from lingvo_moe.core.base_layer import BaseLayer
    from lingvo_moe.core.task.base_task import BaseTask


# Flags that set a parameter of the experiment.
_SHORT_FOR = {"mesh": "train.mesh", "max_steps": "train.max_steps", "data_dir": "input.data_dir"}


class UsageError(ValueError):
    """Raised for flags that contradict each other, or that contradict the run in --logdir."""


def check_flags(args: Flags, params: Params) -> None:
    """Raises UsageError for flags that the modes with a run cannot work with, before anything slow starts."""
    if not args.logdir:
        what = "evaluate" if args.mode == "eval" else "train"
        raise UsageError(f"--logdir is needed to {what}: the directory of the run")
    check_evaluation(params)
    if args.eval_lines is not None and not params.task.cls.CHECKPOINT_SCORER:
        raise UsageError(
            f"--eval_lines={args.eval_lines}: {args.model} translates nothing, and its held-out loss is that of "
            f"train.eval_batches={params.train.eval_batches}; set that, or leave the flag out"
        )
    params.input.cls.CheckSource(params.input)
    check_paths(args, params)
    if args.engine in ONE_DEVICE_ENGINES and args.num_devices > 1:
        raise UsageError(
            f"--num_devices={args.num_devices}: --engine={args.engine} runs on one device; use --engine=pjrt"
        )
    if args.init_from and os.path.realpath(args.init_from) == os.path.realpath(args.logdir):
        raise UsageError(
            f"--init_from={args.init_from} is --logdir itself: a run that goes on needs no --init_from, and one that "
            "begins from its weights another --logdir"
        )
    if params.train.upcycle_at:
        check_upcycling(args, params)


def check_upcycling(args: Flags, params: Params) -> None:
    """Raises UsageError where train.upcycle_at has no smaller model to begin with, or no time for one of the two."""
    at, last = params.train.upcycle_at, params.train.max_steps
    # A branch of a run that has grown does not grow again.
    if args.init_from and not args.init_from_state:
        why = f"the run begins with the weights of --init_from={args.init_from}; leave one of the two out"
    elif at >= last:
        why = f"must be less than train.max_steps={last}"
    elif not params.task.cls.GrowsFrom(params.task):
        why = (
            "needs a model with experts that, alone or with the shared ones, are as wide as its dense layers, whose "
            "hidden units they begin with"
        )
    else:
        return
    raise UsageError(f"train.upcycle_at={at}: {why}")


def check_evaluation(params: Params) -> None:
    """Raises UsageError for early stopping without evaluations."""
    train = params.train
    if train.early_stopping_evals and not train.eval_interval_steps:
        raise UsageError(
            f"train.early_stopping_evals={train.early_stopping_evals}: nothing is evaluated while "
            "train.eval_interval_steps=0; set it, e.g. to 100"
        )


def check_paths(args: Flags, params: Params) -> None:
    """Checks every path of a job before anything is written.

    Raises:
        PathError: an unknown address, or characters that a library cannot work with.
        UsageError: a flag that works on disk only, with an address.
        OutputError: --logdir cannot be written; or is, lies in, or holds data, an exported model or another run.
    """
    for flag in ("logdir", "init_from", "data_dir"):
        check_place(getattr(args, flag), f"--{flag}", portable=flag != "data_dir")
    if is_address(args.logdir) and (args.restart or args.mode == "eval"):
        raise UsageError(
            f"--logdir={args.logdir}: --restart and --mode=eval work on runs on disk only; name another run"
        )
    data = params.input
    places = {f"input.{name}": data.Get(name) for name in (*data.cls.READS, *data.cls.ADDS_TO)}
    check_place(data_dir := places.pop("input.data_dir", ""), "input.data_dir", portable=False)
    for name, place in places.items():
        check_local(place, name)
    for name in (f"input.{name}" for name in data.cls.ADDS_TO):
        if places[name]:
            check_addable(places[name], name)
    if not is_address(args.logdir):
        check_logdir(args.logdir, {"--data_dir": data_dir} if data_dir else {})
        check_writable(args.logdir, f"--logdir={args.logdir}")


def strategy_override(args: Flags, more: str = "") -> str:
    """`--strategy` with `--model_params_override` appended, which may change it, and `more`.

    Raises:
        StrategyError, RegistryError: as read_overrides.
        UsageError: one of these sets a parameter to another value than a flag of its own does.
    """
    strategy = getattr(args, "strategy", "")
    texts = {
        f"--strategy={strategy}": read_overrides(strategy, args.model) if strategy else "",
        "--model_params_override": args.model_params_override,
        "--variants": more,
    }
    for where, text in texts.items():
        given = dict(registry.split_override(text))
        for flag, path in _SHORT_FOR.items():
            value = args[flag].value if flag in args else None
            if value not in (None, "") and given.get(path, str(value)) != str(value):
                raise UsageError(
                    f"--{flag}={value}: {where} has {path}={given[path]}, which would have no effect; leave one out"
                )
    return join_overrides(*texts.values())


def full_override(args: Flags) -> str:
    """`--strategy` and `--model_params_override`, with the shorthand flags appended."""
    parts = [strategy_override(args)]
    if args.max_steps is not None:
        parts.append(f"train.max_steps={args.max_steps}")
    if args.data_dir:
        parts.append(f"input.data_dir={registry.escape(absolute(args.data_dir))}")
    return join_overrides(*parts)


def check_data_dir(args: Flags) -> None:
    """Raises UsageError if --data_dir is given but the experiment's input reads no directory.

    Raises RegistryError like GetParams.
    """
    if not args.data_dir:
        return
    data = registry.GetParams(args.model, strategy_override(args)).input
    if "data_dir" not in data:
        raise UsageError(
            f"--data_dir={args.data_dir}: {args.model} reads no directory of data ({data.cls.__name__} has no "
            "data_dir); leave the flag out"
        )


def check_data_exists(args: Flags, params: Params) -> None:
    """Raises UsageError if what the input reads does not exist: before a run is moved aside or compared."""
    for name in params.input.cls.READS:
        place = params.input.Get(name)
        if place and not is_address(place) and not os.path.exists(place):
            flag = "--data_dir" if name == "data_dir" and args.data_dir else f"input.{name}"
            raise UsageError(f"{flag}={place} does not exist")


def check_divisible(params: Params, task: "BaseTask", mesh: Mesh) -> None:
    """Checks that the mesh divides what it shards, and that the batch divides into micro-batches.

    It looks at the splits of the task and of every layer in it, and at every variable. Messages name the parameter.

    Raises:
        ShardingError: a sharding names an axis that the mesh lacks, a size is not divisible by its axis, or nothing is
            sharded along an axis.
        MicroBatchError: the batch, or its groups, are not divisible by the number of micro-batches.
        ScheduleError: what task.pipeline asks for does not go together, or not with the layers or the mesh.
        UsageError: stages on one device.
    """
    from lingvo_moe.core.input.division import check_divides  # which imports TensorFlow

    divided = _divided_sizes(params)
    name, num = micro_batches_of(params)
    check_divides(num, divided, name)
    settings, parts = settings_of(params.task), task.PipelineParts()
    if settings is not None and mesh.size == 1 and STAGE not in mesh.axis_names:
        raise UsageError(
            f"task.pipeline.stages={settings.stages}: there is one device (mesh {mesh}), and each stage needs its own; "
            f"give --mesh={STAGE}:{settings.stages},{mesh} and, on a CPU, --num_devices={settings.stages}"
        )
    if settings is not None and parts is not None:
        schedule_on(settings, parts.sizes, task.p.activation_split, mesh)
    if mesh.size == 1:
        return
    if settings is not None and parts is None:
        _check_stage_axis(settings.stages, task.p.weight_split.get("Z"), mesh)
    layers = [("task", task), *_layers_of(task, "task")]
    for path, layer in layers:
        for name in ("weight_split", "activation_split"):
            _check_axes(f"{path}.{name}", layer.p.Get(name), mesh)
    for _, layer in layers:
        split = layer.p.activation_split
        for letter in task.DIVIDED:
            for path in task.SIZES[letter]:
                _check_size(path, params.Get(path), split.get(letter), mesh)
                if path in divided:
                    _check_part(path, params, split.get(letter), mesh)
    for path, spec in task.VariableSpecs().FlattenItems():
        for letter, size, axis in zip(spec.letters, spec.shape, spec.split, strict=True):
            sized_by = [p for p in task.SizeParams(path, letter) if params.Get(p) == size]
            if sized_by:
                _check_size(sized_by[0], size, axis, mesh)
            else:
                _check_parts(f"variable {path}: {letter}={size}", size, axis, mesh)
    _check_axes_are_used(params, task, [layer for _, layer in layers], mesh)


def check_budget(train: Params, num_processes: int) -> None:
    """Raises UsageError for a budget that the processes of a job would not see used up at the same step."""
    if train.max_cpu_seconds and num_processes > 1:
        raise UsageError(
            f"train.max_cpu_seconds={train.max_cpu_seconds:g}: is the time of one process, and this job has "
            f"{num_processes}; use train.max_units or train.max_steps"
        )


def _check_stage_axis(stages: int, axis: Axis, mesh: Mesh) -> None:
    """Raises ScheduleError unless each stage of cells of different shapes has devices of its own."""
    lacking = [name for name in axes_of(axis) if name not in mesh.axis_names]
    if not axis or (not lacking and mesh.axis_size(axis) != stages):
        raise ScheduleError(
            f"task.pipeline.stages={stages}: mesh {mesh} has no axis with a device for each stage; e.g. --mesh={STAGE}:"
            f"{stages},{DATA}:{max(1, mesh.size // stages)} and task.weight_split={{'Z': '{STAGE}'}}"
        )


def _check_axes_are_used(
    params: Params, task: "BaseTask", layers: Sequence["BaseLayer"], mesh: Mesh
) -> None:
    """Raises ShardingError for an axis along which the devices hold the same and compute the same."""
    splits = [spec.StoredSplit(mesh) for spec in task.StateSpecs().Flatten()]
    for layer in layers:
        for letter, axis in layer.p.activation_split.items():
            sizes = [params.Get(path) for path in task.SIZES.get(letter, ())]
            if any(sizes) or not sizes:  # with 0 experts there is no dimension E
                splits.append((axis,))
    used = {name for split in splits for axis in split for name in axes_of(axis)}
    if settings_of(params.task) is not None:
        used.add(STAGE)
    for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if size > 1 and name not in used:
            rest = ",".join(f"{a}:{n}" for a, n in zip(mesh.axis_names, mesh.shape) if a != name)
            remedy = f"name {name!r} in task.activation_split or task.weight_split"
            if name == STAGE:
                remedy = f"set task.pipeline.stages={size}"
            raise ShardingError(
                f"mesh {mesh}: nothing is sharded along {name!r}, so its {size} devices would compute the same; "
                f"{f'use --mesh={rest}, or ' if rest else ''}{remedy}"
            )


def _layers_of(layer: "BaseLayer", path: str) -> Iterator[tuple[str, "BaseLayer"]]:
    """All layers inside a layer with their paths, parents first."""
    for child in layer.children.Flatten():
        inside = f"{path}.{child.p.name}"
        yield inside, child
        yield from _layers_of(child, inside)


def _check_axes(name: str, split: SplitMap, mesh: Mesh) -> None:
    """Raises ShardingError if the split that the parameter `name` holds has an axis that the mesh lacks."""
    for letter, axis in split.items():
        for part in axes_of(axis):
            if part not in mesh.axis_names:
                raise ShardingError(
                    f"{name}: {letter!r} is sharded along {part!r}, and mesh {mesh} has no axis {part!r}"
                    f"{did_you_mean(part, mesh.axis_names)}"
                )


def _check_size(path: str, size: int, axis: Axis, mesh: Mesh) -> None:
    """Raises ShardingError if the parameter at `path` is not divisible by the axis that shards what it sizes."""
    hint = f", or --model_params_override='{path}=...'"
    _check_parts(f"{path}={size}", size, axis, mesh, hint)


def _divided_sizes(params: Params) -> dict[str, int]:
    """The sizes that a micro-batch has 1/M of, by the paths of their parameters."""
    task = params.task
    paths = [task.cls.SIZES["B"][0], *(f"task.{name}" for name in task.cls.MicroBatchSizes(task))]
    return {path: params.Get(path) for path in paths}


def _check_part(path: str, params: Params, axis: Axis, mesh: Mesh) -> None:
    """Raises ShardingError if a micro-batch's part of a size is not divisible by the axis that shards it."""
    (name, num), size = micro_batches_of(params), params.Get(path)
    settings = settings_of(params.task)
    if settings is not None and settings.by_replica:
        axis = tuple(a for a in axes_of(axis) if a != DATA)
    parts = mesh.axis_size(axis) if axis else 1
    if size // num % parts:
        good = [n for n in range(1, num) if size % (n * parts) == 0]
        raise ShardingError(
            f"{name}={num}: a micro-batch has {path}={size} / {num} = {size // num}, which does not "
            f"divide over the {parts} devices of axis {axis!r} of mesh {mesh}; set {name} to "
            f"{either(good)}, or {path} to a multiple of {num * parts}"
        )


def _check_parts(what: str, size: int, axis: Axis, mesh: Mesh, hint: str = "") -> None:
    parts = mesh.axis_size(axis) if axis else 1
    if size % parts:
        raise ShardingError(
            f"{what} does not divide over the {parts} devices of axis {axis!r} of mesh {mesh}; "
            f"use a mesh with a divisor of {size} there (--mesh){hint}"
        )
