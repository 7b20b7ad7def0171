"""Layers of different shapes for tests of pipelines, and one step of them with all gradients."""

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap, flatten
from lingvo_moe.core.pipeline.layers import SeqLayer

SIZES = (5, 7, 3, 6, 2)  # of the boundaries of four cells


class Dense(BaseLayer):
    """tanh(x w + b), times an int32 mask of rows that is passed on if there is one."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("inputs", 4, "Columns of x.")
        p.Define("outputs", 4, "Columns of the result.")
        return p

    def __init__(self, params):
        super().__init__(params)
        p = self.p
        init = WeightInit.FanIn(p.inputs)
        self.CreateVariable("w", WeightParams((p.inputs, p.outputs), "IO", init))
        self.CreateVariable("b", WeightParams((p.outputs,), "O", WeightInit.Gaussian(0.3)))

    def FProp(self, theta, x, mask=None):
        y = tf.tanh(tf.matmul(x, theta.w) + theta.b)
        return y if mask is None else (y * tf.cast(mask, y.dtype)[:, tf.newaxis], mask)

    @classmethod
    def FPropMeta(cls, params, *input_shapes):
        rows, rest = input_shapes[0][0], tuple(input_shapes[1:])
        flops = 2 * rows * params.inputs * params.outputs
        return NestedMap(flops=flops, out_shapes=((rows, params.outputs), *rest))


class WithExtras(Dense):
    """Dense with noise, a loss, and a moving average of its inputs."""

    def __init__(self, params):
        super().__init__(params)
        init = WeightInit.Constant(0.5)
        average = WeightParams((self.p.inputs,), "I", init, trainable=False)
        self.CreateVariable("average", average)

    def FPropWithExtras(self, theta, args, seed):
        x = args[0]
        mean = tf.reduce_sum(x, 0) / x.shape[0]
        if seed is not None:
            x += 0.1 * tf.cast(randomness.normal(seed, x.shape.as_list()), x.dtype)
        y = tf.tanh(tf.matmul(x, theta.w) + theta.b + tf.reduce_sum(theta.average))
        extras = NestedMap(loss=tf.reduce_sum(tf.square(theta.w)) * tf.reduce_sum(mean))
        extras.updates = NestedMap()
        extras.updates.Set(f"{self.path}.average", theta.average + mean)
        return (y, *args[1:]), extras


def cells(cls: type = Dense, sizes=SIZES) -> list:
    """Params of cells c0, c1, ... between boundaries of some sizes."""
    return [
        cls.Params().Set(name=f"c{i}", inputs=a, outputs=b)
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]


def make(layer: type[SeqLayer], cell: type = Dense, **params: Any) -> Any:
    """A SeqLayer or PipeliningLayer of a layer before, four cells and a layer after."""
    before = Dense.Params().Set(name="before", inputs=5, outputs=5)
    after = Dense.Params().Set(name="after", inputs=2, outputs=3)
    p = layer.Params().Set(name="seq", before_tpl=[before], after_tpl=[after])
    return p.Set(cell_tpl=cells(cell)).Set(**params).Instantiate()


def step(layer: BaseLayer) -> Callable[..., NestedMap]:
    """(theta, args) -> outputs, loss, and gradients of theta and of the first argument."""

    def run(theta: NestedMap, args: Any) -> NestedMap:
        leaves = theta.Flatten()
        first = flatten(args)[0]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*leaves, first])
            outputs = layer.FProp(theta, *args)
            y = flatten(outputs)[0]
            loss = tf.reduce_sum(tf.square(y - 0.3) * tf.range(1.0, 4.0, dtype=y.dtype))
        *grads, dx = tape.gradient(loss, [*leaves, first])
        return NestedMap(y=y, loss=loss, grads=theta.Pack(grads), dx=dx)

    return run
