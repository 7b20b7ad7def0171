"""A stack of dense layers in a loop, and its training on a mesh of eight devices."""

import functools

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.layers.repeat import Repeat
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from lingvo_moe.core.task.base_task import BaseTask

M, H, L, ROWS = 16, 64, 3, 16
MESH = Mesh.parse("data:4,expert:2")
PARAMETERS = M + L * 2 * M * H  # of Stack


class Dense(BaseLayer):
    """x + tanh(x wi) wo."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateVariable("wi", WeightParams((M, H), "MH", WeightInit.FanIn(M)))
        self.CreateVariable("wo", WeightParams((H, M), "HM", WeightInit.FanIn(H)))

    def FProp(self, theta, x, shared, seed=None):
        h = tf.tanh(tf.einsum("BTM,MH->BTH", x, self.Cast(theta.wi)))
        return x + tf.einsum("BTH,HM->BTM", h, self.Cast(theta.wo)), NestedMap()


class Stack(BaseTask):
    """L such layers, and the mean square of their output times a vector."""

    def __init__(self, params):
        super().__init__(params)
        body = Repeat.Params().Set(body=Dense.Params(), num_repeats=L)
        self.CreateChild("blocks", body)
        self.CreateVariable("scale", WeightParams((M,), "M", WeightInit.Constant(1.0)))

    def FProp(self, theta, batch, seed=None):
        x = tf.cast(self.Shard(batch.x, "BTM"), self.fprop_dtype)
        y, _ = self.blocks.FProp(theta.blocks, x, NestedMap(), seed)
        y = tf.cast(y, tf.float32) * tf.cast(theta.scale, tf.float32)
        loss = tf.reduce_mean(tf.square(y - batch.x))
        return loss, NestedMap(loss=loss, examples=tf.constant(float(ROWS)))


class Rows:
    """The input's specs alone."""

    def BatchSpec(self):
        return NestedMap(x=ArraySpec((ROWS, 1, M), "float32", "BTM"))


def stack_task(level="none", optimizer=Adam, **others):
    rows = {"B": ("data", "expert")}
    p = Stack.Params().Set(name="stack", shard_state=level, activation_split=rows, **others)
    return p.Set(optimizer=optimizer.Params()).Instantiate()


@functools.cache
def compiled_step(level, num=1, **others):
    task = stack_task(level, **others)
    engine = PjrtEngine(MESH)
    return task, engine, engine.BuildStep(train_step(task, Rows(), num))


def begun(task, engine):
    """The state before the first step; the same whatever its sharding."""
    with use_mesh(single_device()):
        state = task.InitState(tf.constant(3))
    return engine.Put(state.Transform(np.asarray), task.StateSpecs())


def batch_of(i):
    x = np.random.default_rng(i).normal(size=(ROWS, 1, M))
    return NestedMap(x=x.astype(np.float32))


def trained(level, steps=5, **others):
    """Losses and gradient norms [steps, 2], and the state after them as NumPy arrays."""
    task, engine, step = compiled_step(level, **others)
    state = begun(task, engine)
    rows = []
    for i in range(steps):
        state, metrics = step(state, batch_of(i))
        rows.append([float(metrics.loss), float(metrics.grad_norm)])
    return np.array(rows), state.Transform(np.asarray)
