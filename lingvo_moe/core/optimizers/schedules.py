"""Learning-rate schedules: a step in, a rate out."""

import math

import tensorflow as tf

from lingvo_moe.core import checks
from lingvo_moe.core.hyperparams import InstantiableParams


class Schedule:
    """The base: `Params().Instantiate().Value(step)`."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        return InstantiableParams(cls)

    def __init__(self, params: InstantiableParams):
        self.p = params.Copy().Freeze()

    def Value(self, step: tf.Tensor) -> tf.Tensor:
        """The rate (float32 scalar) of the update that turns state `step` (0 is the first) into the next."""
        raise NotImplementedError(f"{type(self).__name__}.Value")


class Constant(Schedule):
    """Always the same rate."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("value", 1.0, "The rate.", check=checks.NOT_NEGATIVE)
        return p

    def Value(self, step: tf.Tensor) -> tf.Tensor:
        del step
        return tf.constant(self.p.value, tf.float32)


class SqrtDecay(Schedule):
    """multiplier / sqrt(max(step, warmup_steps)): constant at first, then a square-root decay.

    This is how Lingvo reads "learning rate 1.0 with square-root decay after 10k steps", the paper's
    recipe: the 1.0 is the multiplier, and the rate starts at 1 / sqrt(10000) = 0.01. Adafactor's rate
    is relative to the size of a weight, so that a literal 1.0 would replace the weights at each of the
    first steps. `ConstantThenSqrtDecay` takes the sentence literally.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("multiplier", 1.0, "Over the square root.", check=checks.NOT_NEGATIVE)
        p.Define(
            "warmup_steps",
            10_000,
            "The rate is constant for so many steps; 1 or more.",
            check=checks.SIZE,
        )
        return p

    def Value(self, step: tf.Tensor) -> tf.Tensor:
        clock = tf.maximum(tf.cast(step, tf.float32), float(self.p.warmup_steps))
        return self.p.multiplier * tf.math.rsqrt(clock)


class ConstantThenSqrtDecay(Schedule):
    """value * sqrt(constant_steps / max(step, constant_steps)), after an optional linear rise."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("value", 1.0, "The rate before the decay.", check=checks.NOT_NEGATIVE)
        p.Define("constant_steps", 10_000, "The decay starts here; 1 or more.", check=checks.SIZE)
        p.Define(
            "rise_steps",
            0,
            "The rate rises linearly over so many steps; 0: it starts in full.",
            check=checks.COUNT,
        )
        return p

    def Value(self, step: tf.Tensor) -> tf.Tensor:
        p = self.p
        now = tf.cast(step, tf.float32)
        decay = tf.math.rsqrt(tf.maximum(now / float(p.constant_steps), 1.0))
        rise = tf.minimum((now + 1.0) / float(max(p.rise_steps, 1)), 1.0)
        return p.value * decay * rise


class WarmupThenCosine(Schedule):
    """A linear rise to `value` over `warmup_steps`, then half a cosine down to 0 at `total_steps`."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("value", 0.1, "The highest rate.", check=checks.NOT_NEGATIVE)
        p.Define("warmup_steps", 0, "Steps of the rise; 0: none.", check=checks.COUNT)
        p.Define(
            "total_steps",
            100_000,
            "The rate is 0 from here on; more than warmup_steps.",
            check=checks.SIZE,
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if p.total_steps <= p.warmup_steps:
            why = f"must be more than warmup_steps={p.warmup_steps}"
            raise checks.ParamError("total_steps", str(p.total_steps), why)

    def Value(self, step: tf.Tensor) -> tf.Tensor:
        p = self.p
        now = tf.cast(step, tf.float32)
        rise = tf.minimum((now + 1.0) / float(max(p.warmup_steps, 1)), 1.0)
        done = (now - p.warmup_steps) / float(p.total_steps - p.warmup_steps)
        done = tf.clip_by_value(done, 0.0, 1.0)
        return p.value * rise * 0.5 * (1.0 + tf.cos(math.pi * done))
