"""Lists and counts a model's variables from their specs: nothing is allocated."""

import math
from collections.abc import Iterable

import tensorflow as tf
from rich.console import Console

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.console import units
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pages.tables import Table, numbers, show, words
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import HOST, part_shape
from lingvo_moe.core.task.base_task import BaseTask


def count_parameters(specs: Iterable[VariableSpec]) -> int:
    """The number of elements of all variables."""
    return sum(math.prod(spec.shape) for spec in specs)


def itemsize_of(dtype: str) -> int:
    """The bytes of an element of that number format."""
    return tf.as_dtype(dtype).size


def bytes_of(spec: VariableSpec) -> int:
    """The bytes of a variable, all of its parts together."""
    return math.prod(spec.shape) * itemsize_of(spec.dtype)


def bytes_per_device(spec: VariableSpec, mesh: Mesh) -> int:
    """The bytes that one device holds of a variable, rounded up where a dimension does not divide."""
    return math.prod(part_shape(spec.shape, spec.StoredSplit(mesh), mesh)) * itemsize_of(spec.dtype)


def print_variables(
    specs: Iterable[VariableSpec], mesh: Mesh, console: Console | None = None
) -> None:
    """Prints a table of the variables (name, shape, type, sharding, bytes on each device) and the totals."""
    console = console or Console(width=140)
    specs = list(specs)
    columns = words("variable", "shape", "letters", "type", "sharding") + numbers("per device")
    rows = [
        [
            *(spec.path, "x".join(map(str, spec.shape)) or "scalar", spec.letters, spec.dtype),
            describe_split(spec, mesh) + (", in the host's memory" if spec.memory == HOST else ""),
            units.size(bytes_per_device(spec, mesh), 1),
        ]
        for spec in specs
    ]
    show(Table(columns, rows), console)
    total = sum(bytes_per_device(spec, mesh) for spec in specs)
    count = count_parameters(specs)
    about = units.in_words(count)
    console.print(
        f"total: {len(specs)} variables, {count:,} parameters{f' ({about})' if about else ''}; "
        f"{units.size(total, 1)} on each of {mesh.size} devices (mesh {mesh}){_of_hosts(specs, mesh)}"
    )


def _of_hosts(specs: Iterable[VariableSpec], mesh: Mesh) -> str:
    """Says how many bytes of a device's variables are in its host's memory; '' for none."""
    size = sum(bytes_per_device(spec, mesh) for spec in specs if spec.memory == HOST)
    return f", {units.size(size, 1)} of them in the memory of its host" if size else ""


def active_parameters(task: BaseTask) -> dict[str, int]:
    """The parameters that take part in the computation of a token, by what is counted; {} where nothing is embedded.

    A softmax that uses the table of an embedding takes part with it.
    """
    parts, tables = task.DeclaredParts(), {"embedding": 0, "softmax": 0}
    for spec in task.VariableSpecs().Flatten():
        part, _ = parts[spec.path.rpartition(".")[0]]
        if part in tables:
            tables[part] += math.prod(spec.shape)
    count, embedding, softmax = task.ActiveParameters(), tables["embedding"], tables["softmax"]
    if not embedding:
        return {}
    if not softmax:
        return {"with embeddings": count, "without": count - embedding}
    return {
        "with both embeddings": count,
        "without that of the input": count - embedding,
        "without both": count - embedding - softmax,
    }


def print_active(task: BaseTask) -> None:
    """Prints the active parameters, and the bytes of a decoder's cache, of a task that has them."""
    if counts := active_parameters(task):
        listed = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        print(f"parameters active for a token: {listed}")
    if cache := task.Costs().CacheBytes():
        print(f"cache of a decoder: {cache:,} bytes a token")


def print_optimizer(task: BaseTask, mesh: Mesh) -> None:
    """Prints the state that training keeps beside the weights, and how many variables decay or learn slowly.

    Raises ParamError: a pattern of these that matches no variable.
    """
    specs = task.VariableSpecs()
    state, optimizer = task.StateSpecs(), task.optimizer
    decays, slow = optimizer.Decays(specs), optimizer.Slow(specs)
    count = count_parameters(s for s in state.theta.Flatten() if s.trainable)

    def size(part: NestedMap) -> str:
        on_device = sum(bytes_per_device(spec, mesh) for spec in part.Flatten())
        total = sum(map(bytes_of, part.Flatten()))
        there = _of_hosts(part.Flatten(), mesh)
        return f"{total / count:.2g} bytes a parameter, {units.size(on_device, 1)} on each device{there}"

    lines = [f"optimizer {type(optimizer).__name__}: {size(state.slots)}"]
    if optimizer.p.weight_decay:
        lines.append(
            f"weight decay {optimizer.p.weight_decay:g} on {sum(decays.values())} of {len(decays)} variables: "
            f"{_ends(path for path, does in decays.items() if does)}"
        )
    if slow:
        share = f"{optimizer.p.slow_share:g} times the learning rate"
        lines.append(f"{share} for {len(slow)} of {len(decays)} variables: {_ends(slow)}")
    if "ema" in state:
        lines.append(f"moving average of the weights: {size(state.ema)}")
    print("\n".join(lines))


def _ends(paths: Iterable[str]) -> str:
    """The different last parts of paths, e.g. '*.wi, *.wo'."""
    return ", ".join(sorted({f"*.{path.rpartition('.')[2]}" for path in paths})) or "none"


def print_flops(task: BaseTask, batch: NestedMap) -> None:
    """Prints the forward FLOPs per token or image by part of the model, and those of a training step.

    Prints nothing for a task that does not say. `batch` holds ArraySpecs of a full batch.
    """
    parts = task.Costs().FlopsByPart(batch)
    total = sum(parts.values())
    if not total:
        return
    counted, count = list(task.Costs().BatchCounts(batch).items())[-1]
    counted = counted.replace("_", " ")
    per = f"forward FLOPs per {counted.removesuffix('s')}"
    rows = [
        [name, units.work(flops / count), units.share(flops / total)]
        for name, flops in [*parts.items(), ("total", total)]
    ]
    print()
    show(Table(words("part") + numbers(per, "share"), rows), Console(width=140))
    print(
        f"a training step: {units.work(task.Costs().StepFlops(batch))} for {count:,} {counted}, padding included: "
        "three times the forward pass, without dispatch and what the backward pass computes again"
    )
    if stages := task.Costs().StageFlops(batch):
        listed = ", ".join(units.work(flops / count) for flops in stages)
        spread = max(stages) * len(stages) / sum(stages)
        print(
            f"a pipeline of {len(stages)} stages: {per} {listed}; the largest is {spread:.3f} times their mean"
        )


def describe_split(spec: VariableSpec, mesh: Mesh) -> str:
    """'E:expert', or 'replicated'."""
    cut = [
        f"{letter}:{axis if isinstance(axis, str) else '*'.join(axis)}"
        for letter, axis in zip(spec.letters, spec.StoredSplit(mesh), strict=True)
        if axis is not None
    ]
    return " ".join(cut) or "replicated"
