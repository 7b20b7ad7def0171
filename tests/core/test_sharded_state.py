"""train.shard_state and train.offload: the same training in less memory, by the collectives that they promise."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.base_input import ArraySpec
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.base_task import BaseTask, TaskError
from lingvo_moe.core.checks import STATE_LEVELS
from lingvo_moe.core.engine import aot
from lingvo_moe.core.engine.base import EngineError, make_engine
from lingvo_moe.core.engine.checkpoints import Checkpointer
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.engine.specs import TensorSpec
from lingvo_moe.core.engine.steps import build_step, lower_step, train_step
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.inspect import bytes_per_device
from lingvo_moe.core.layers.repeat import Repeat
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.core.sharding import Mesh

M, H, L, ROWS = 16, 64, 3, 16
MESH = Mesh.parse("data:4,expert:2")
PARAMETERS = M + L * 2 * M * H  # of _Stack


class _Dense(BaseLayer):
    """x + tanh(x wi) wo."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateVariable("wi", WeightParams((M, H), "MH", WeightInit.FanIn(M)))
        self.CreateVariable("wo", WeightParams((H, M), "HM", WeightInit.FanIn(H)))

    def FProp(self, theta, x, shared, seed=None):
        h = tf.tanh(tf.einsum("BTM,MH->BTH", x, self.Cast(theta.wi)))
        return x + tf.einsum("BTH,HM->BTM", h, self.Cast(theta.wo)), NestedMap()


class _Stack(BaseTask):
    """L such layers, and the mean square of their output times a vector."""

    def __init__(self, params):
        super().__init__(params)
        body = Repeat.Params().Set(body=_Dense.Params(), num_repeats=L)
        self.CreateChild("blocks", body)
        self.CreateVariable("scale", WeightParams((M,), "M", WeightInit.Constant(1.0)))

    def FProp(self, theta, batch, seed=None):
        x = tf.cast(self.Shard(batch.x, "BTM"), self.fprop_dtype)
        y, _ = self.blocks.FProp(theta.blocks, x, NestedMap())
        y = tf.cast(y, tf.float32) * tf.cast(theta.scale, tf.float32)
        loss = tf.reduce_mean(tf.square(y - batch.x))
        return loss, NestedMap(loss=loss, examples=tf.constant(float(ROWS)))


class _Rows:
    """The input's specs alone."""

    def BatchSpec(self):
        return NestedMap(x=ArraySpec((ROWS, 1, M), "float32", "BTM"))


def _task(level="none", optimizer=Adam, **others):
    rows = {"B": ("data", "expert")}
    p = _Stack.Params().Set(name="stack", shard_state=level, activation_split=rows, **others)
    return p.Set(optimizer=optimizer.Params()).Instantiate()


@functools.cache
def _compiled(level, num=1, **others):
    task = _task(level, **others)
    engine = PjrtEngine(MESH)
    return task, engine, build_step(train_step(task, _Rows(), num), engine)


def _begun(task, engine):
    """The state before the first step; the same whatever its sharding."""
    specs = [TensorSpec((), "int32")]
    init = engine.Build(task.InitState, specs, results=task.StateSpecs(), name="init")
    return init(np.int32(3))


def _batch(i):
    x = np.random.default_rng(i).normal(size=(ROWS, 1, M))
    return NestedMap(x=x.astype(np.float32))


def _trained(level, steps=5, **others):
    """Losses and gradient norms [steps, 2], and the state after them as NumPy arrays."""
    task, engine, step = _compiled(level, **others)
    state = _begun(task, engine)
    found = []
    for i in range(steps):
        state, metrics = step(state, _batch(i))
        found.append([float(metrics.loss), float(metrics.grad_norm)])
    return np.array(found), state.Transform(np.asarray)


_FORMS = [{}, {"optimizer": Adafactor}, {"num": 2}, {"dtype": "bfloat16"}, {"ema_decay": 0.9}]


@pytest.mark.parametrize("level", STATE_LEVELS[1:])
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_training_is_that_of_copied_state(level, form):
    want, whole = _trained("none", **form)
    found, state = _trained(level, **form)
    narrow = "dtype" in form
    np.testing.assert_allclose(found, want, rtol=2e-3 if narrow else 1e-6)
    for (path, x), y in zip(state.FlattenItems(), whole.Flatten(), strict=True):
        np.testing.assert_allclose(
            x.astype(np.float32), y.astype(np.float32), 0.02 if narrow else 1e-4, 1e-6, err_msg=path
        )
    assert want[-1, 0] < want[0, 0]


@pytest.mark.parametrize("level", STATE_LEVELS)
def test_arguments_shrink_as_zero_says(level):
    """Adam in mixed precision: 2 bytes a weight and 12 of slots, copied or over 8 devices."""
    task, _, step = _compiled(level, dtype="bfloat16")
    weights = 2 * PARAMETERS // (8 if level == "weights" else 1)
    slots = 12 * PARAMETERS // (8 if level != "none" else 1)
    batch, counters = 4 * ROWS * M // 8, 2 * 4
    assert step.Memory()["arguments"] == weights + slots + batch + counters
    state = sum(bytes_per_device(spec, MESH) for spec in task.StateSpecs().Flatten())
    assert state == weights + slots + counters


def test_gradients_take_a_part_of_their_memory():
    """The stacks of gradients, which the backward loop writes, are what a device holds beside the state."""

    def temporaries(level):
        return _compiled(level)[2].Memory()["temporaries"]

    stacks = 4 * L * 2 * M * H
    assert temporaries("none") - temporaries("gradients") > 0.8 * stacks * 7 / 8


def test_weights_are_gathered_layer_by_layer():
    _, _, step = _compiled("weights")
    gathered = [c for c in step.Collectives() if c.kind == "all-gather"]
    layer = 4 * M * H
    assert {c.num_bytes for c in gathered if c.num_bytes >= layer} == {layer}
    # wi and wo, in the forward loop and in the backward loop.
    assert sum(c.num_bytes == layer for c in gathered) == 4


def _restored(saved, restored, directory):
    """A state after a step of one form, and what a run of another form goes on from: both as NumPy arrays by path."""
    (level, form), (other_level, other_form) = saved, restored
    task, engine, step = _compiled(level, **form)
    state, _ = step(_begun(task, engine), _batch(0))
    before = dict(state.Transform(np.asarray).FlattenItems())
    with Checkpointer(str(directory)) as checkpointer:
        checkpointer.Save(1, state)
        checkpointer.Wait()
        other, engine, step = _compiled(other_level, **other_form)
        again, _ = checkpointer.Restore(other.StateSpecs(), engine)
    after = dict(again.Transform(np.asarray).FlattenItems())
    step(again, _batch(1))
    return before, after


_HOST = {"offload": "slots"}


@pytest.mark.parametrize(
    "saved, restored",
    [
        (("none", {}), ("weights", {})),
        (("weights", {}), ("none", _HOST)),
        (("none", _HOST), ("slots", {})),
    ],
)
def test_a_checkpoint_is_restored_into_any_other(saved, restored, tmp_path):
    before, after = _restored(saved, restored, tmp_path)
    assert before.keys() == after.keys()
    for path, x in before.items():
        np.testing.assert_array_equal(x, after[path], err_msg=path)


@pytest.mark.parametrize(
    "form",
    [
        {"offload": "slots"},
        {"offload": "slots", "dtype": "bfloat16", "level": "weights"},
        {"offload": "master", "dtype": "bfloat16", "clip_gradient_norm": 0.01},
        {"offload": "slots", "optimizer": Adafactor, "num": 2},
    ],
    ids=str,
)
def test_training_with_slots_in_the_hosts_memory(form):
    """CPU devices have such a memory by name: the program moves the slots there and back."""
    level = form.get("level", "none")
    plain = {k: v for k, v in form.items() if k not in ("offload", "level")}
    want, whole = _trained(level, **plain)
    found, state = _trained(**{"level": level, **form})
    np.testing.assert_allclose(found, want, rtol=1e-6)
    for (path, x), y in zip(state.FlattenItems(), whole.Flatten(), strict=True):
        same = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(*same, rtol=1e-4, atol=1e-6, err_msg=path)
    task, engine, _ = _compiled(**{"level": level, **form})
    slots = _begun(task, engine).slots
    kinds = {path: x.sharding.memory_kind for path, x in slots.FlattenItems()}
    there = {path for path, kind in kinds.items() if kind == "pinned_host"}
    stacks = {path for path in kinds if path.startswith("blocks")}
    if form["offload"] == "master":
        stacks = {path for path in stacks if path.endswith("master")}
    assert there == stacks and there


def test_a_step_that_is_not_finite_changes_nothing_on_the_host():
    task, engine, step = _compiled("none", offload="slots")
    state, _ = step(_begun(task, engine), _batch(0))
    before = state.Transform(np.asarray)
    state, metrics = step(state, NestedMap(x=np.full((ROWS, 1, M), np.inf, np.float32)))
    assert float(metrics.skipped) == 1
    for part in ("theta", "slots"):
        items = zip(before[part].FlattenItems(), state[part].Flatten(), strict=True)
        for (path, x), y in items:
            np.testing.assert_array_equal(x, np.asarray(y), err_msg=path)


@pytest.mark.parametrize("offload", ["slots", "master"])
def test_the_tpu_compiler_keeps_offloaded_slots_out_of_the_device(offload):
    """By the compiler's own figures; a layer at a time is on the device, twice: on its way in and on its way out."""

    def memory(offload):
        step = train_step(_task("none", dtype="bfloat16", offload=offload), _Rows())
        return aot.compile_for_topology(lower_step(step, MESH), "v5p:2x2x2").memory

    bytes_there = L * 2 * M * H * (12 if offload == "slots" else 4)
    plain, offloaded = memory("none"), memory(offload)
    assert offloaded["host_arguments"] >= bytes_there  # with the padding of its layout
    assert plain["arguments"] - offloaded["arguments"] == offloaded["host_arguments"]


def test_an_offload_that_frees_nothing_is_refused():
    with pytest.raises(TaskError, match=r"train.offload=master: no stack of layers has such slots"):
        _task(offload="master").StateSpecs()
    step = train_step(_task(offload="slots"), _Rows())
    with pytest.raises(EngineError, match=r"train.offload takes --engine=pjrt"):
        build_step(step, make_engine("tf", Mesh.parse("data:1")))


def test_a_float32_run_goes_on_in_mixed_precision_and_back(tmp_path):
    mixed = {"dtype": "bfloat16"}
    before, after = _restored(("none", {}), ("weights", mixed), tmp_path / "to")
    wi = "blocks.body.wi"
    np.testing.assert_array_equal(after[f"slots.{wi}.master"], before[f"theta.{wi}"])
    rounded = before[f"theta.{wi}"].astype(after[f"theta.{wi}"].dtype)
    np.testing.assert_array_equal(after[f"theta.{wi}"], rounded)
    np.testing.assert_array_equal(after[f"slots.{wi}.mean"], before[f"slots.{wi}.mean"])
    before, after = _restored(("slots", mixed), ("none", {}), tmp_path / "back")
    np.testing.assert_array_equal(after[f"theta.{wi}"], before[f"slots.{wi}.master"])
    assert not any(path.endswith("master") for path in after)
