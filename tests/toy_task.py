"""A complete task: a linear model, numbers to fit, and an experiment, `toy_task.Line`. B row, M feature."""

import numpy as np
import tensorflow as tf

from lingvo_moe import api


class LinearModel(api.BaseTask):
    def __init__(self, params):
        super().__init__(params)
        self.CreateVariable("w", api.WeightParams((8,), "M", api.WeightInit.Gaussian(1.0)))

    def FProp(self, theta, batch, seed=None):
        y = tf.einsum("BM,M->B", self.Shard(batch.x, "BM"), theta.w)
        loss = tf.reduce_mean((y - batch.y) ** 2)
        return loss, api.NestedMap(loss=loss, examples=tf.cast(tf.size(y), tf.float32))

    def Costs(self):
        return api.TaskCosts(self.UNIT, lambda batch: {"linear": 2 * batch.x.shape[0] * 8})


class Numbers(api.BaseInput):
    def BatchSpec(self):
        shape = self.p.batch_size, 8
        return api.NestedMap(
            x=api.ArraySpec(shape, "float32", "BM"), y=api.ArraySpec(shape[:1], "float32", "B")
        )

    def __iter__(self):
        return _Batches(self.p.batch_size)


class _Batches(api.BatchIterator):
    def __init__(self, rows=16):
        self._made, self._rows = 0, rows

    def __next__(self):
        self._made += 1
        x = np.random.default_rng(self._made).normal(size=(self._rows, 8)).astype(np.float32)
        return api.NestedMap(x=x, y=x.sum(1))

    def GetState(self):
        return {"made": self._made}

    def SetState(self, state):
        self._made = state["made"]


class Line(api.Experiment):
    def Task(self):
        return LinearModel.Params().Set(name="line", activation_split={"B": "data"})

    def Input(self):
        return Numbers.Params().Set(batch_size=16)
