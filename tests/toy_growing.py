"""A toy task that grows out of a smaller one, as an experiment, `toy_growing.Line`: a second weight, 0 at first."""

import tensorflow as tf
import toy_held_out
import toy_task

from lingvo_moe.core.base_layer import WeightParams
from lingvo_moe.core.config import registry
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.task.task_growth import TaskGrowth


class _Growth(TaskGrowth):
    def GrowsFrom(self):
        return {"wide": False} if self.p.wide else {}


class Model(toy_task.LinearModel):
    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("wide", True, "Whether there is the second weight.")
        return p

    @classmethod
    def Growth(cls, task):
        return _Growth(task)

    def __init__(self, params):
        super().__init__(params)
        if self.p.wide:
            self.CreateVariable("v", WeightParams((8,), "M", WeightInit.Gaussian(1.0)))

    def Grow(self, small, fresh):
        return NestedMap(w=small.w, v=map_structure(tf.zeros_like, fresh.v))

    def FProp(self, theta, batch, seed=None):
        w = theta.w + tf.tanh(theta.v) if self.p.wide else theta.w
        return super().FProp(NestedMap(w=w), batch, seed)


@registry.Register
class Line(toy_held_out.Line):
    def Task(self):
        return Model.Params().Set(name="line", activation_split={"B": "data"})
