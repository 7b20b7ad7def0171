"""A task of two stacks, one reading the other's output as it comes, small enough for every schedule in float64."""

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.layers.repeat import Repeat
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.schedules import Constant
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.core.pipeline.params import pipeline_params
from lingvo_moe.core.pipeline.parts import Parts, Stack
from lingvo_moe.core.pipeline.schedule import STAGE
from lingvo_moe.core.task.base_task import BaseTask

WIDTH, LENGTH = 6, 5


class Block(BaseLayer):
    """x + tanh(x w), plus the memory where there is one; adds the mean square of its output to the loss.

    A factor from the seed stands for dropout, whose masks take more operations than all else here.
    """

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("width", WIDTH, "M.")
        return p

    def __init__(self, params):
        super().__init__(params)
        shape = (self.p.width, self.p.width)
        self.CreateVariable("w", WeightParams(shape, "MH", WeightInit.Gaussian(0.5)))

    def FProp(self, theta, x, shared, seed=None):
        h = x + shared.memory if "memory" in shared else x
        h = tf.tanh(tf.einsum("BTM,MH->BTH", h, theta.w))
        y = x + (h if seed is None else h * (tf.cast(seed[0], x.dtype) * 2.0**-31))
        real = tf.cast(shared.real, x.dtype)[:, tf.newaxis, tf.newaxis]
        square = tf.reduce_sum(tf.square(y) * real) / tf.maximum(tf.reduce_sum(real), 1.0)
        return y, NestedMap(square=square * tf.cast(shared.share, x.dtype))


class TwoStacks(BaseTask):
    """Rows of ids, embedded, through the stacks `low` and `high`; a mean over rows that count."""

    UNIT = "rows"

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("blocks", 4, "Of each stack.")
        p.Define("width", WIDTH, "M.")
        p.Define("pipeline", pipeline_params(), "Stages.")
        return p.Set(
            optimizer=Sgd.Params().Set(
                momentum=0.0, learning_rate=Constant.Params().Set(value=0.005)
            )
        )

    def __init__(self, params):
        if params.pipeline.stages > 1:
            params = params.Copy().Set(weight_split={"L": STAGE, **(params.weight_split or {})})
        super().__init__(params)
        for name in ("low", "high"):
            body = Block.Params().Set(width=self.p.width)
            parts = self.p.pipeline.stages * self.p.pipeline.repeats
            repeat = Repeat.Params().Set(body=body, num_repeats=self.p.blocks, parts=parts)
            self.CreateChild(name, repeat)
        for name in ("embedding", "softmax", "scale"):
            width = self.p.width
            shape, letters = ((width,), "M") if name == "scale" else ((10, width), "VM")
            self.CreateVariable(name, WeightParams(shape, letters, WeightInit.Gaussian(1.0)))

    def Units(self, batch):
        return NestedMap(rows=tf.reduce_sum(tf.cast(batch.real, tf.float32)))

    def FProp(self, theta, batch, seed=None):
        return self.MicroBatchTerms(theta, batch, seed, NestedMap(rows=tf.constant(1.0)))

    def MicroBatchTerms(self, theta, batch, seed, shares):
        def run(stack, x, **shared):
            given = NestedMap(shared, real=batch.real, share=shares.rows)
            x, extras = self.children[stack].FProp(
                theta[stack], x, given, seed=self.FoldSeed(seed, stack)
            )
            return x, 0.1 * tf.reduce_sum(extras.square), extras

        x, low_loss, low = run("low", self._Embed(theta, batch))
        memory = x * theta.scale
        y, high_loss, high = run("high", self._Embed(theta, batch), memory=memory)
        loss, metrics = self._Loss(theta, y, batch, shares)
        loss += low_loss + high_loss
        return loss, NestedMap(metrics, loss=loss, low=low.square, high=high.square)

    def PipelineParts(self):
        if self.p.pipeline.stages == 1:
            return None

        def stack(name, **kwargs):
            def run(weights, rest, carry, context, chunk):
                shared = NestedMap(real=context.batch.real, share=context.shares.rows)
                if "memory" in carry:
                    shared.memory = carry.memory * rest.scale
                seed = self.FoldSeed(context.seed, name)
                layers = self.children[name]
                x, extras = layers.FProp(weights, carry.x, shared, seed, chunk)
                return NestedMap(carry, x=x), 0.1 * tf.reduce_sum(extras.square), extras

            return Stack(
                name=name,
                weights=name,
                num_blocks=self.p.blocks,
                enter=lambda rest, context: NestedMap(x=self._Embed(rest, context.batch)),
                run=run,
                **kwargs,
            )

        return Parts(
            stacks=(
                stack("low", carry={"x": "BTM"}, takes={}),
                stack("high", carry={"memory": "BTM", "x": "BTM"}, takes={"memory": "x"}),
            ),
            takes=("x",),
            loss=lambda rest, carry, context: self._Loss(
                rest, carry.x, context.batch, context.shares
            ),
            metrics=lambda sums, loss, extras: NestedMap(
                sums, loss=loss, low=extras.low.square, high=extras.high.square
            ),
        )

    def _Embed(self, theta, batch):
        return self.Shard(tf.gather(theta.embedding, batch.ids), "BTM")

    def _Loss(self, theta, y, batch, shares):
        logits = self.Shard(tf.einsum("BTM,VM->BTV", y, theta.softmax), "BTV")
        real = tf.cast(batch.real, y.dtype)
        rows = tf.reduce_sum(real)
        error = tf.reduce_mean(tf.square(logits - 1.0), [1, 2])
        loss = tf.reduce_sum(error * real) / tf.maximum(rows, 1.0)
        return loss * tf.cast(shares.rows, y.dtype), NestedMap(rows=rows)


def toy(rows=16, dtype="float32", width=WIDTH, length=LENGTH, blocks=4, **pipeline):
    """The task, a batch whose last rows do not count, and its specs."""
    params = TwoStacks.Params().Set(name="toy", dtype=dtype, width=width, blocks=blocks)
    params.activation_split = {"B": "data"}
    for name, value in pipeline.items():
        params.pipeline.Set(**{name: value})
    rng = np.random.RandomState(0)
    batch = NestedMap(
        ids=rng.randint(10, size=(rows, length)).astype(np.int32),
        real=(np.arange(rows) % 5 != 0) & (np.arange(rows) < rows - 2),
    )
    specs = NestedMap(
        ids=ArraySpec((rows, length), "int32", "BT"), real=ArraySpec((rows,), "bool", "B")
    )
    return params.Instantiate(), batch, specs
