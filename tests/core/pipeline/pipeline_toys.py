"""Layers of different shapes for tests of pipelines, and a task of them."""

import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.nested_map import NestedMap, updates_of
from lingvo_moe.core.optimizers.schedules import Constant
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.core.pipeline.layers import PipeliningLayer, SeqLayer
from lingvo_moe.core.pipeline.params import pipeline_params
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.task_strategy import TaskStrategy

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


def make_params(layer: type[SeqLayer], cell: type = Dense, sizes: Any = SIZES) -> Any:
    """Params of a SeqLayer or PipeliningLayer of a layer before, four cells and a layer after."""
    before = Dense.Params().Set(name="before", inputs=sizes[0], outputs=sizes[0])
    after = Dense.Params().Set(name="after", inputs=sizes[-1], outputs=3)
    p = layer.Params().Set(name="seq", before_tpl=[before], after_tpl=[after])
    return p.Set(cell_tpl=cells(cell, sizes))


def make(layer: type[SeqLayer], cell: type = Dense, **params: Any) -> Any:
    """The layer of make_params, with other Params set."""
    return make_params(layer, cell).Set(**params).Instantiate()


class CellTask(BaseTask):
    """A mean over rows of what `seq`, a SeqLayer or a PipeliningLayer, makes of them, and the losses of its cells."""

    UNIT = "rows"

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("seq", SeqLayer.Params(), "The layers.")
        p.Define("pipeline", pipeline_params(), "Stages.")
        rate = Constant.Params().Set(value=0.005)
        return p.Set(optimizer=Sgd.Params().Set(momentum=0.0, learning_rate=rate))

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("seq", self.p.seq)

    @classmethod
    def Strategy(cls, task):
        return TaskStrategy(task, cells=True)

    def FProp(self, theta, batch, seed=None):
        outs, extras = self.seq.FPropWithExtras(theta.seq, self._Args(batch), seed)
        loss, metrics = self._Loss(outs)
        metrics.update({name: extras[name].loss for name in extras if name != "updates"})
        loss += 3.0 * sum(value for name, value in metrics.items() if name != "rows")
        return loss, NestedMap(metrics, loss=loss, **updates_of(extras))

    def PipelineParts(self):
        if self.p.pipeline.stages == 1:
            return None

        def metrics(sums, loss, extras):
            losses = {name: extras[name].loss for name in extras if name != "updates"}
            return NestedMap(sums, loss=loss, **losses, **updates_of(extras))

        return self.seq.Parts(
            "seq",
            args=lambda context: self._Args(context.batch),
            loss=lambda outs, context: self.Terms(*self._Loss(outs), context.shares),
            metrics=metrics,
            added_loss=lambda extras: (
                3.0 * tf.add_n([x.loss for n, x in extras.items() if n != "updates"])
            ),
        )

    def _Args(self, batch):
        return (self.Shard(batch.x, "BM"), batch.mask)

    def _Loss(self, outs):
        y = outs[0]
        errors = tf.square(y - 0.3) * tf.range(1.0, 4.0, dtype=y.dtype)
        return tf.reduce_sum(errors) / y.shape[0], NestedMap(rows=tf.constant(float(y.shape[0])))


def cell_toy(rows=16, cell=WithExtras, dtype="float32", sizes=SIZES, split=None, **pipeline):
    """The task, a batch and its specs."""
    layer = PipeliningLayer if pipeline else SeqLayer
    params = CellTask.Params().Set(name="task", dtype=dtype, activation_split=split or {})
    params.seq = make_params(layer, cell, sizes)
    for name, value in pipeline.items():
        params.pipeline.Set(**{name: value})
    params.weight_split = {"Z": "stage"} if pipeline else {}
    rng = np.random.RandomState(0)
    batch = NestedMap(
        x=rng.randn(rows, sizes[0]).astype(dtype), mask=(rng.rand(rows) > 0.3).astype(np.int32)
    )
    specs = NestedMap(
        x=ArraySpec((rows, sizes[0]), dtype, "BM"), mask=ArraySpec((rows,), "int32", "B")
    )
    return params.Instantiate(), batch, specs
