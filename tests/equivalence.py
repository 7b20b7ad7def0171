"""One harness for "sharded = in micro-batches = in stages = decoded = on one device": values and gradients.

`compare` runs a function over devices and its reference on one; `with_gradients` makes such a function of a layer, and
a task's step is one already. `assert_same` compares what they return, `assert_steps` a decoder's steps with its pass
over the whole sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.engine.eager.testing import Collectives, run_sharded, run_single
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap, flatten, flatten_items
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.step import Step


def assert_same(got: Any, want: Any, tol: float = 1e-5, floor: float = 0.01) -> None:
    """Asserts that two trees have the same paths and close numbers; NaN is close to nothing.

    Args:
        got, want: trees of arrays or tensors.
        tol: the relative error, and the absolute one as a share of the tensor's largest number.
        floor: the least such number that counts: smaller tensors may be off by tol times this.
    """
    got, want = flatten_items(got), flatten_items(want)
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, x), (_, y) in zip(got, want, strict=True):
        x, y = np.asarray(x, "float64"), np.asarray(y, "float64")
        atol = tol * max(np.abs(y).max(initial=0.0), floor)
        np.testing.assert_allclose(x, y, tol, atol, equal_nan=False, err_msg=path)


def with_gradients(fn: Callable, loss_of: Callable | None = None) -> Callable[..., NestedMap]:
    """Makes a function that returns NestedMap(loss, rest, grads), a gradient for each float tensor in its arguments.

    A gradient that does not exist is a scalar NaN, which `assert_same` refuses.

    Args:
        fn: arguments -> (loss, rest).
        loss_of: where fn returns the rest alone, its loss.
    """

    def run(*args: Any) -> NestedMap:
        floats = [x for x in map(tf.convert_to_tensor, flatten(args)) if x.dtype.is_floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(floats)
            if loss_of is None:
                loss, rest = fn(*args)
            else:
                rest = fn(*args)
                loss = loss_of(rest)
        grads = [tf.constant(np.nan) if g is None else g for g in tape.gradient(loss, floats)]
        grads = [tf.convert_to_tensor(g) for g in grads]
        return NestedMap(loss=loss, rest=rest, grads=grads)

    return run


def compare(
    fn: Callable,
    args: Sequence[Any],
    splits: Sequence[Any] | None = None,
    mesh: str = "expert:8",
    reference: Callable | None = None,
    **bounds: float,
) -> tuple[Any, Collectives]:
    """Asserts that a function over devices gives what its reference gives on one device.

    Args:
        fn: of trees of tensors, e.g. `with_gradients` of a layer, or the step of a task.
        args: the trees.
        splits: see `run_sharded`.
        mesh: of the devices.
        reference: another function of these arguments, e.g. the step without stages; None: fn itself.
        bounds: see `assert_same`; here tol is 2e-5 unless given.

    Returns:
        What fn gives over the devices, and the collectives of its program.
    """
    got, collectives = run_sharded(fn, args, Mesh.parse(mesh), splits)
    want = run_single(reference or fn, args, jit_compile=False)
    assert_same(got, want, **{"tol": 2e-5} | bounds)
    return got, collectives


def assert_steps(
    step: Callable,
    x_BTM: tf.Tensor,
    cache: Any,
    mask_BTS: tf.Tensor,
    whole_BTM: Any,
    **bounds: float,
) -> None:
    """Asserts that steps over a cache give the rows of the pass over the whole sequence.

    Args:
        step: (x of one position [B,1,M], cache, its number, its mask [B,1,S]) -> (its result [B,1,M], the next cache).
        x_BTM: the inputs.
        cache: empty.
        mask_BTS: which positions each one sees.
        whole_BTM: the result of the pass.
        bounds: see `assert_same`.
    """
    for t in range(x_BTM.shape[1]):
        at = slice(t, t + 1)
        y, cache = step(x_BTM[:, at], cache, tf.constant(t), mask_BTS[:, at])
        assert_same(y, whole_BTM[:, at], **bounds)


def state_and_batch(task: BaseTask, inputs: BaseInput) -> list[NestedMap]:
    """A training state from a fixed seed, computed on one device, and a batch."""
    state = run_single(task.InitState, [np.int32(3)], jit_compile=False)
    return [state, task.SampleBatch(inputs, np.random.RandomState(0))]


def compare_steps(
    step: Step, reference: Step, task: BaseTask, inputs: BaseInput, mesh: str = "stage:2,data:2"
) -> Collectives:
    """Asserts that a step over devices is another one on one device: the states after them, and the metrics.

    Args:
        step: e.g. of the task in stages.
        reference: e.g. of the same micro-batches without stages.
        task: whose state they start from.
        inputs: whose batch they take.
        mesh: of the first step.

    Returns:
        The collectives of the first step's program.
    """
    args = state_and_batch(task, inputs)
    return compare(step.fn, args, step.arg_specs, mesh, reference.fn, tol=1e-5, floor=1e-3)[1]
