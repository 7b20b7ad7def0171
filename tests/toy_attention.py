"""A task with one attention layer, and two experiments: `toy_attention.Right`, and `toy_attention.Wrong`, whose step
XLA's partitioner computes wrongly over the mesh a:4,b:2.

B row, T and S token, M model, N head, H size of a head; P and R are N and H of weights that are replicated.
"""

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import WeightParams
from lingvo_moe.core.config import registry
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.input.base_input import ArraySpec, BaseInput
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.base_task import BaseTask


class AttentionModel(BaseTask):
    def __init__(self, params):
        super().__init__(params)
        init = WeightInit.Gaussian(0.5)
        for name, letters in (("q", "MPR"), ("k", "MPR"), ("v", "MNH"), ("o", "NHM")):
            shape = tuple(16 if letter == "M" else 8 for letter in letters)
            self.CreateVariable(name, WeightParams(shape, letters, init))

    def FProp(self, theta, batch, seed=None):
        q, k, v = (tf.einsum("BTM,MNH->BTNH", batch.x, theta[name]) for name in "qkv")
        probs = tf.nn.softmax(tf.einsum("BTNH,BSNH->BNTS", q, k))
        context = tf.einsum("BNTS,BSNH->BTNH", self.Shard(probs, "BNTS"), v)
        y = tf.einsum("BTNH,NHM->BTM", context, theta.o)
        loss = tf.reduce_mean(y * tf.sin(7 * batch.x))
        return loss, NestedMap(loss=loss, examples=tf.constant(8.0))

    @classmethod
    def Shrink(cls, task, inputs, mesh):
        inputs.batch_size = 8

    def SampleBatch(self, inputs, rng):
        (spec,) = inputs.BatchSpec().Flatten()
        return NestedMap(x=rng.standard_normal(spec.shape).astype(np.float32))


class Numbers(BaseInput):
    def BatchSpec(self):
        return NestedMap(x=ArraySpec((self.p.batch_size, 16, 16), "float32", "UTM"))

    def __iter__(self):
        raise NotImplementedError


class _Base(registry.Experiment):
    SPLIT: dict[str, str]

    def Task(self):
        return AttentionModel.Params().Set(
            name="toy", activation_split=self.SPLIT, weight_split={"N": "a", "H": "b"}
        )

    def Input(self):
        return Numbers.Params().Set(batch_size=512)

    def Train(self):
        return registry.TrainParams().Set(mesh="a:4,b:2")


@registry.Register
class Right(_Base):
    SPLIT = {"N": "a"}


@registry.Register
class Wrong(_Base):
    SPLIT = {"B": "a", "N": "b"}
