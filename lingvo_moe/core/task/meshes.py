"""The mesh of an experiment, and checks that it divides the experiment's sizes and computation."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import did_you_mean, either
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.command import UsageError
from lingvo_moe.core.pipeline.params import micro_batches_of, schedule_on, settings_of
from lingvo_moe.core.pipeline.schedule import DATA, STAGE
from lingvo_moe.core.sharding import Axis, Mesh, ShardingError, SplitMap
from lingvo_moe.core.sharding.letters import GRADIENTS, NONE, SLOTS, WEIGHTS, axes_of, axis_of

if TYPE_CHECKING:  # they import TensorFlow
    from lingvo_moe.core.base_layer import BaseLayer
    from lingvo_moe.core.task.base_task import BaseTask


def make_mesh(params: Params, text: str = "", num_devices: int = 0) -> Mesh:
    """Parses `--mesh`, or takes the experiment's `train.mesh` and resizes it to the devices.

    Args:
        text: the value of `--mesh`; '' takes `train.mesh`.
        num_devices: devices to fit `train.mesh` to; 0 keeps its own size.

    Raises:
        ShardingError: the text is not a mesh, or the mesh does not fit the number of devices.
    """
    if text:
        return Mesh.parse(text)
    mesh = Mesh.parse(params.train.mesh, "train.mesh")
    return mesh.over_devices(num_devices) if num_devices else mesh


def meshes_for_inference(params: Params, text: str, num_devices: int) -> Iterator[Mesh]:
    """The mesh of a search or of scoring, as for make_mesh; or several, of which the first that the model divides over.

    Of a model whose weights are in parts where its rows are (train.shard_state=weights), several: no weight is gathered
    in inference, so up to 8 neighbouring devices share its heads and its vocabulary, along axis 'model'.

    Args:
        text: the value of `--mesh`.
        num_devices: those there are.

    Raises ShardingError: as make_mesh.
    """
    mesh = make_mesh(params, text, 0 if text else num_devices)
    if text or params.task.shard_state != WEIGHTS or "model" not in mesh.axis_names:
        yield mesh
        return
    for inside in (n for n in range(8, 0, -1) if num_devices % n == 0):
        sizes = [inside if name == "model" else 1 for name in mesh.axis_names]
        yield Mesh(mesh.axis_names, tuple(sizes)).over_devices(num_devices)


def laid_for_inference(params: Params, text: str, num_devices: int) -> tuple[Mesh, Params]:
    """The mesh of a search or of scoring, and the experiment's Params with a task as it lies over it.

    Of meshes_for_inference the first that the sizes divide over, see lay_for_inference; where they do over none, e.g.
    the groups of a held-out batch, the mesh and the task as in training.

    Raises ShardingError: as make_mesh and check_divisible.
    """
    for mesh in meshes_for_inference(params, text, num_devices):
        laid = params.Copy()
        lay_for_inference(laid.task, mesh)
        try:
            check_divisible(laid, laid.task.Instantiate(), mesh, is_trained=False)
        except ShardingError:
            continue
        return mesh, laid
    mesh = make_mesh(params, text, 0 if text else num_devices)
    check_divisible(params, params.task.Instantiate(), mesh, is_trained=False)
    return mesh, params


def lay_for_inference(task: Params, mesh: Mesh) -> None:
    """Lays a task so that inference over a mesh gathers no weight.

    Training may gather weights that lie in parts on the devices that have different rows (train.shard_state=weights);
    for a step of a search that would take longer than the step. So they lie by their letters alone then, e.g. heads and
    vocabulary along axis 'model'. If they divide, heads of keys, and so caches, lie as the other heads do, and experts
    over all devices: tokens go to them.
    """
    if task.shard_state != WEIGHTS:
        return
    task.shard_state = NONE
    rows, weights = {**task.activation_split}, {**task.weight_split}
    heads = mesh.axis_size(rows.get("N") or ())
    if "num_kv_heads" in task and task.num_kv_heads and task.num_kv_heads % heads == 0:
        rows["A"] = weights["A"] = rows.get("N")
    if "num_experts" in task and task.num_experts and task.num_experts % mesh.size == 0:
        rows["G"] = rows["E"] = weights["E"] = mesh.axis_names
    task.activation_split, task.weight_split = rows, weights


def largest_mesh(
    params: Params, override: str, text: str, processes: int, devices_each: int
) -> tuple[int, Mesh]:
    """The most processes, of so many, whose devices an experiment divides over, and their mesh.

    Args:
        params: the experiment's, to which `override` has been applied.
        text: the value of `--mesh`.

    Raises ShardingError: it divides over the devices of none.
    """
    whole, task, count = make_mesh(params, text), params.task.Instantiate(), processes
    while True:
        try:
            mesh = whole.over_devices(count * devices_each)
            check_divisible(params, task, mesh)
            check_state_is_sharded(override, task, mesh)
            return count, mesh
        except ValueError:
            if count == 1:
                raise
            count -= 1


def check_divisible(params: Params, task: "BaseTask", mesh: Mesh, is_trained: bool = True) -> None:
    """Checks that the mesh divides what it shards, and that the batch divides into micro-batches.

    It looks at the splits of the task and of every layer in it, and at every variable. Messages name the parameter.
    Those of a model that `is_trained` here, and not there already, advise other parameters, too.

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
    layers = [("task", task), *_layers_of(task, "task")]
    for path, layer in layers:
        for name in ("weight_split", "activation_split"):
            _check_axes(f"{path}.{name}", layer.p.Get(name), mesh)
    for _, layer in layers:
        split = layer.p.activation_split
        for letter in task.DIVIDED:
            for path in task.SIZES[letter]:
                _check_size(path, params.Get(path), split.get(letter), mesh, is_trained)
                if path in divided:
                    _check_part(path, params, split.get(letter), mesh)
    for path, spec in task.VariableSpecs().FlattenItems():
        for letter, size, axis in zip(spec.letters, spec.shape, spec.split, strict=True):
            sized_by = [p for p in size_params(task, path, letter) if params.Get(p) == size]
            if sized_by:
                _check_size(sized_by[0], size, axis, mesh, is_trained)
            else:
                _check_parts(f"variable {path}: {letter}={size}", size, axis, mesh)
    _check_axes_are_used(params, task, [layer for _, layer in layers], mesh, is_trained)


def size_params(task: "BaseTask", path: str, letter: str) -> tuple[str, ...]:
    """The parameters that set the size of dimension `letter` of the variable at `path`: see BaseTask.SIZES."""
    for name, sized_by in task.SIZES.items():
        part, _, last = name.rpartition(".")
        if last == letter and part in path:
            return sized_by
    return ()


def check_state_is_sharded(override: str, task: "BaseTask", mesh: Mesh) -> None:
    """Raises UsageError if an override asks for a level of train.shard_state that shards nothing over a mesh."""
    path = "train.shard_state"
    level = dict(registry.split_override(override)).get(path, NONE)
    if level == NONE or _shards_more(task, level, mesh):
        return
    why = f"mesh {mesh}, along whose axes there are no copies that they divide; leave it out"
    if mesh.size == 1:
        why = (
            f"one device (mesh {mesh}), which holds all of the state; leave it out or train on several (--engine=pjrt, "
            "--num_devices)"
        )
    raise UsageError(f"{path}={level}: has no effect on {why}")


def _shards_more(task: "BaseTask", level: str, mesh: Mesh) -> bool:
    """Whether a level shards a tensor of its part of the state further than the letters do."""
    if level == GRADIENTS:
        specs = task.GradientSpecs().Flatten()
    else:
        state = task.StateSpecs()
        names = (
            [name for name in ("slots", "ema") if name in state] if level == SLOTS else ["theta"]
        )
        specs = [spec for name in names for spec in state[name].Flatten()]
    return mesh.size > 1 and any(spec.StoredSplit(mesh) != spec.split for spec in specs)


def _check_axes_are_used(
    params: Params,
    task: "BaseTask",
    layers: Sequence["BaseLayer"],
    mesh: Mesh,
    is_trained: bool,
) -> None:
    """Raises ShardingError for an axis along which the devices compute the same, even if each stores its own part."""
    splits = [spec.split for spec in task.StateSpecs().Flatten()]
    for layer in layers:
        for letter, axis in layer.p.activation_split.items():
            sizes = [params.Get(path) for path in task.SIZES.get(letter, ())]
            if any(sizes) or not sizes:  # with 0 experts there is no dimension E
                splits.append((axis,))
    used = {name for split in splits for axis in split for name in axes_of(axis)}
    if (settings := settings_of(params.task)) is not None:
        used.add(STAGE)
    if settings is not None and settings.cells:
        used &= {STAGE, DATA}
    for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if size > 1 and name not in used:
            if settings is not None and settings.cells and name != DATA:
                raise ShardingError(
                    f"mesh {mesh}: stages of different shapes have axis {STAGE!r}, and {DATA!r} for their rows, so the "
                    f"{size} devices along {name!r} would compute the same; give --mesh={STAGE}:{settings.stages},"
                    f"{DATA}:{mesh.size // settings.stages}"
                )
            split = {letter: axis for letter, axis in task.p.activation_split.items() if axis}
            for letter in {"B", *split} & set("BG"):
                split[letter] = axis_of((name, *axes_of(split.get(letter))))
            remedy = f"set --model_params_override='task.activation_split={json.dumps(split)}'"
            if name == STAGE:
                remedy = f"set task.pipeline.stages={size}"
            if not is_trained:
                remedy = "give a mesh without it (--mesh)"
            level = params.train.shard_state
            stored = f" (train.shard_state={level} shards storage alone)" * (level != NONE)
            raise ShardingError(
                f"mesh {mesh}: neither rows nor a letter of the computation are sharded along {name!r}, so its {size} "
                f"devices would compute the same{stored}; {remedy}"
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


def _check_size(path: str, size: int, axis: Axis, mesh: Mesh, is_trained: bool) -> None:
    """Raises ShardingError if the parameter at `path` is not divisible by the axis that shards what it sizes."""
    hint = f", or --model_params_override='{path}=...'" * is_trained
    _check_parts(f"{path}={size}", size, axis, mesh, hint)


def _divided_sizes(params: Params) -> dict[str, int]:
    """The sizes that a micro-batch has 1/M of, by the paths of their parameters."""
    task = params.task
    names = task.cls.Strategy(task).MicroBatchSizes()
    paths = [task.cls.SIZES["B"][0], *(f"task.{name}" for name in names)]
    return {path: params.Get(path) for path in paths}


def _check_part(path: str, params: Params, axis: Axis, mesh: Mesh) -> None:
    """Raises ShardingError if a micro-batch's part of a size is not divisible by the axis that shards it."""
    (name, num), size = micro_batches_of(params), params.Get(path)
    settings = settings_of(params.task)
    if settings is not None and not settings.cells:
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
