"""Verifies a program without knowing any pattern of faults: over a mesh it must be what it is on one device.

    xs.verify(layer, mesh, x, w)                 # a function: values and gradients
    python -m tools.verify --model=mt.M4Tiny     # a model: a whole training step

A model's step is the trainer's own, annotations included; the experiment's sizes are shrunk to the smallest ones
that the mesh divides (`BaseTask.Shrink`). It runs over virtual CPU devices and by TensorFlow on one device. The
first tensor that differs is named.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorflow as tf

from lingvo_moe.analysis.plans.recomputing import chosen_form
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import NO_OFFLOAD
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.engine.base import Compiled, Engine
from lingvo_moe.core.engine.device_memory import memory_of
from lingvo_moe.core.engine.eager.testing import Collectives, run_sharded, run_single
from lingvo_moe.core.engine.loop.steps import initial_state, train_step
from lingvo_moe.core.engine.lowering.specs import TensorSpec, numpy_dtype
from lingvo_moe.core.engine.pjrt import CompiledProgram, PjrtEngine
from lingvo_moe.core.engine.program_analysis import OFF
from lingvo_moe.core.engine.tf_engine import TfEngine, TfGraphEngine
from lingvo_moe.core.nested_map import NestedMap, flatten_items, pack, skeleton
from lingvo_moe.core.pipeline.params import micro_batches_of
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.step import Step

# Relative to the largest magnitude of a tensor. Rounding in float32 stays two orders below; faults of the
# partitioner are errors of several percent at least.
TOLERANCE = 2e-3
# The same for a narrower type, in its distances between 1 and the next number: 3% for bfloat16.
_TOLERANCE_IN_EPS = 4
# What is smaller than this is compared with it: a gradient that cancels to zero has no digits.
_LEAST_SCALE = 1e-5
# Metrics that BaseTask.TrainStep takes from the gradients.
_OF_GRADIENTS = ("grad_norm", "learning_rate", "skipped")


class VerifyError(ValueError):
    """A program that computes something over a mesh which it does not compute on one device."""


@dataclass(frozen=True)
class Difference:
    """A tensor that differs."""

    name: str  # its path in the results, e.g. 'gradient of theta.encoder.w'
    # The largest difference of finite values, relative to the largest finite magnitude on one device; infinite where a
    # value that is not finite is another one over the mesh.
    error: float
    shape: tuple[int, ...]  # the tensor's shape
    letters: str = ""  # the einsum letters of its dimensions; '' where they are not known

    def __str__(self) -> str:
        letters = f" ({self.letters})" if self.letters else ""
        return f"{self.name}{list(self.shape)}{letters} is off by {self.error:.2g} of its largest magnitude"


def verify(fn: Any, mesh: Mesh | str, *args: Any, tolerance: float = TOLERANCE) -> None:
    """Compares an annotated function over a mesh with the same function on one device.

    Values are compared, and the gradients of a weighted sum of all floating-point results by all floating-point
    arguments.

    Args:
        fn: a TensorFlow function of tensors and trees of them.
        mesh: of as many virtual CPU devices as there are at most.
        args: for each argument a tensor, an array or a tree of them; in place of a tensor a TensorSpec, for which
            normally distributed numbers are taken (zeros where it is of integers).
        tolerance: the largest error, relative to a tensor's largest magnitude; larger for types narrower than float32.

    Raises:
        VerifyError: names the first result or gradient that differs, or that has no finite value on one device.
        ShardingError, LoweringError, EngineError: as `lowering.lower` and `PjrtEngine`.
    """
    mesh = Mesh.parse(mesh, "verify: mesh")
    rng = np.random.RandomState(0)
    values = [pack(skeleton(a), [_value(rng, x) for _, x in flatten_items(a)]) for a in args]
    counts = [len(flatten_items(value)) for value in values]
    flat = [leaf for value in values for _, leaf in flatten_items(value)]
    names = [name for i, v in enumerate(values) for name, _ in flatten_items(v, f"args[{i}]")]
    wanted = [i for i, leaf in enumerate(flat) if _is_floating(leaf.dtype)]

    def values_and_gradients(*leaves: tf.Tensor) -> list[tf.Tensor]:
        rest, trees = list(leaves), []
        for value, count in zip(values, counts, strict=True):
            trees.append(pack(skeleton(value), rest[:count]))
            rest = rest[count:]
        watched = [leaves[i] for i in wanted]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            out = [tf.convert_to_tensor(y) for _, y in flatten_items(fn(*trees))]
            loss = tf.add_n([tf.zeros([])] + [_weighted(y) for y in out if y.dtype.is_floating])
        zero = tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(loss, watched, unconnected_gradients=zero)
        return [*out, *(tf.convert_to_tensor(g) for g in gradients)]

    got, _ = run_sharded(values_and_gradients, flat, mesh, results=None)
    want = run_single(values_and_gradients, flat, mesh)
    results = [f"result[{i}]" for i in range(len(want) - len(wanted))]
    every = [*results, *(f"gradient of {names[i]}" for i in wanted)]
    what = getattr(fn, "__name__", "fn")
    _check_finite(what, every, want)
    _refuse(what, mesh, _compare(every, got, want, tolerance))


class Verified(NamedTuple):
    """A training step that is over a mesh what it is on one device."""

    names: list[str]  # the names of the tensors that were compared, in order
    program: CompiledProgram  # over the mesh

    def __str__(self) -> str:
        counts = sorted(Collectives(self.program).items())
        has = ", ".join(f"{count} {kind}" for kind, count in counts)
        return (
            f"{len(self.names)} tensors of a small training step are those of one device; its program has "
            f"{has or 'no collectives'}"
        )


def verify_model(
    model: str, mesh: Mesh, override: str = "", tolerance: float = TOLERANCE
) -> Verified:
    """Compares a training step of an experiment over a mesh with the same step on one device.

    Loss and metrics, the gradient of every trainable variable and the whole new state are compared. The step is
    the trainer's, from the experiment's Params with smaller sizes.

    Args:
        mesh: of as many virtual CPU devices as there are at most.
        override: as --model_params_override.
        tolerance: the largest error, relative to a tensor's largest magnitude; larger for types narrower than float32.

    Raises:
        VerifyError: names the first tensor that differs, or that has no finite value on one device.
        TaskError: the task does not say how it is shrunk.
        ValueError: of some subclass: an experiment, override or mesh that cannot be.
    """
    params = shrunk(model, mesh, override)
    task = params.task.Instantiate()
    inputs = params.input.Instantiate()
    batch = task.SampleBatch(inputs, np.random.RandomState(0))
    # The memory of hosts changes no result, and TensorFlow's own programs have none.
    alone = params.task.Copy().Set(offload=NO_OFFLOAD).Instantiate()
    one_device = TfGraphEngine()
    start = one_device.Get(initial_state(alone, one_device, 1234))

    def step_of(part: BaseTask) -> Step:
        return _with_gradients(part, train_step(part, inputs, params.train.num_micro_batches))

    def results(engine: Engine, run: Compiled) -> dict[str, np.ndarray]:
        state, rest = (engine.Get(tree) for tree in run(start, batch))
        return dict(_in_order(task, state, rest))

    devices, reference = PjrtEngine(mesh, known_faults=OFF), TfEngine()
    program = devices.BuildStep(step_of(task))
    got = results(devices, program)
    want = results(reference, reference.BuildStep(step_of(alone)))
    letters = {
        f"{kind}{path}": spec.letters
        for path, spec in task.VariableSpecs().FlattenItems()
        for kind in ("gradient of theta.", "new theta.")
    }
    _check_finite(f"the shrunk step of {model}", list(want), want.values())
    differing = _compare(list(want), got.values(), want.values(), tolerance, letters)
    _refuse(f"the training step of {model}", mesh, differing)
    return Verified(list(want), program)


def shrunk(model: str, mesh: Mesh, override: str = "") -> Params:
    """The Params of an experiment whose sizes are the smallest that a mesh divides.

    Raises:
        TaskError: the task does not say how it is shrunk.
        ValueError: of some subclass: no such experiment, or an override that cannot be.
    """
    params = registry.GetParams(model, override)
    params.task = _trained_form(params, mesh)
    params.task.cls.Shrink(params.task, params.input, mesh)
    _, num = micro_batches_of(params)  # each of which has the smallest sizes
    params.input.batch_size *= num
    for name in params.task.cls.Strategy(params.task).MicroBatchSizes():
        params.task.Set(**{name: params.task.Get(name) * num})
    params.task.cls.ConfigureInput(params.task, params.input)
    params.task.cls.CheckInput(params.task, params.input)
    return params


def _trained_form(params: Params, mesh: Mesh) -> InstantiableParams:
    """Params of the task as it is trained over a mesh, or over one device where the full sizes do not divide."""
    try:
        return chosen_form(params, mesh, memory_of("pjrt", mesh))[0]
    except ShardingError:
        alone = mesh.over_devices(1)
        return chosen_form(params, alone, memory_of("pjrt", alone))[0]


def _with_gradients(task: BaseTask, step: Step) -> Step:
    """The step of a task, whose metrics become NestedMap(metrics, gradients): those of trainable variables."""
    update, recorded = task.optimizer.Update, dict[str, list[tf.Tensor]]()

    def recording(before: NestedMap, grads: NestedMap, *rest: Any) -> Any:
        recorded["gradients"] = [g for g in grads.Flatten() if g is not None]
        return update(before, grads, *rest)

    def fn(state: NestedMap, batch: NestedMap) -> tuple[NestedMap, NestedMap]:
        state, metrics = step.fn(state, batch)
        return state, NestedMap(metrics=metrics, gradients=recorded["gradients"])

    task.optimizer.Update = recording
    return replace(step, fn=fn)


def _in_order(
    task: BaseTask, state: NestedMap, rest: NestedMap
) -> Iterable[tuple[str, np.ndarray]]:
    """The results of a step by name, in the order in which they are computed."""
    metrics = dict(rest.metrics.FlattenItems())
    late = {path: metrics.pop(path) for path in _OF_GRADIENTS if path in metrics}
    for path, value in metrics.items():
        yield f"metric {path}", value
    trainable = [path for path, spec in task.VariableSpecs().FlattenItems() if spec.trainable]
    for path, value in zip(trainable, rest.gradients, strict=True):
        yield f"gradient of theta.{path}", value
    for path, value in late.items():
        yield f"metric {path}", value
    for path, value in state.FlattenItems():
        yield f"new {path}", value


def _compare(
    names: Sequence[str],
    got: Iterable[Any],
    want: Iterable[Any],
    tolerance: float,
    letters: dict[str, str] | None = None,
) -> list[Difference]:
    differences = []
    for name, g, w in zip(names, got, want, strict=True):
        g, w = np.asarray(g), np.asarray(w)
        error = _error(g, w)
        if not error <= _tolerance(w.dtype, tolerance):
            differences.append(Difference(name, error, np.shape(w), (letters or {}).get(name, "")))
    return differences


def _error(got: np.ndarray, want: np.ndarray) -> float:
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.isfinite(want)
    same_elsewhere = np.array_equal(got[~finite], want[~finite], equal_nan=True)
    got, want = got[finite], want[finite]
    if not same_elsewhere or not np.isfinite(got).all():
        return float("inf")
    scale = np.max(np.abs(want), initial=0.0)
    return float(np.max(np.abs(got - want), initial=0.0) / max(scale, _LEAST_SCALE))


def _tolerance(dtype: Any, tolerance: float) -> float:
    """`tolerance`, or what rounding to a narrow floating-point type takes."""
    if not _is_floating(dtype):
        return tolerance
    return max(tolerance, _TOLERANCE_IN_EPS * float(ml_dtypes.finfo(dtype).eps))


def _check_finite(what: str, names: Sequence[str], want: Iterable[Any]) -> None:
    """Raises VerifyError for a tensor without a finite value on one device, such as a loss that is NaN."""
    for name, w in zip(names, want, strict=True):
        w = np.asarray(w)
        if w.size and not np.isfinite(w).any():
            raise VerifyError(
                f"{what} is not finite on one device: nothing is verified. {name}{list(w.shape)} has no finite value"
            )


def _refuse(what: str, mesh: Mesh, differing: Sequence[Difference]) -> None:
    if not differing:
        return
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    raise VerifyError(
        f"{what} over mesh {mesh} is not what it is on one device: {differing[0]}{more}. XLA's partitioner "
        f"computes something else; change an annotation or the mesh, and look at the program with "
        f"tools.explain"
    )


def _value(rng: np.random.RandomState, leaf: Any) -> np.ndarray:
    if not isinstance(leaf, (TensorSpec, tf.TensorSpec)):
        return np.asarray(leaf)
    dtype = numpy_dtype(tf.as_dtype(leaf.dtype).name)
    if not _is_floating(dtype):
        return np.zeros(tuple(leaf.shape), dtype)
    return rng.standard_normal(tuple(leaf.shape)).astype(dtype)


def _is_floating(dtype: Any) -> bool:
    """Unlike NumPy, TensorFlow knows that bfloat16 and the like are floating-point types."""
    return tf.as_dtype(dtype).is_floating


def _weighted(y: tf.Tensor) -> tf.Tensor:
    """A float32 sum of a result whose summands have weights of their own."""
    weights = tf.cos(tf.cast(tf.range(y.shape.num_elements()), tf.float32))
    return tf.reduce_sum(tf.cast(y, tf.float32) * tf.reshape(weights, y.shape))
