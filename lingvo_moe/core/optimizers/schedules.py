"""Learning-rate schedules: a step in, a rate out. docs/optimizers.md says what to choose when.

`registry.py` names them for the command line.
"""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams


class Mismatch(NamedTuple):
    """A parameter of a schedule that does not suit the length of a run."""

    # `name`, `value`: the parameter's.
    name: str
    value: int
    why: str  # what is wrong, as a phrase
    # A value with which the schedule and the run end together; None where there is none.
    better: int | None


class LearningRateSchedule:
    """The base: `Params().Instantiate().Value(step)`."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        return InstantiableParams(cls)

    def __init__(self, params: InstantiableParams):
        self.p = params.Copy().Freeze()

    @classmethod
    def SetModelDim(cls, params: HyperParams, model_dim: int) -> None:
        """Sets in the Params of a schedule that depends on it the width of the model."""

    @property
    def ends_with_run(self) -> bool:
        """Whether the rate depends on the step at which the run ends, which the state then holds."""
        return False

    def Value(self, step: tf.Tensor, last: tf.Tensor | None = None) -> tf.Tensor:
        """The rate (float32 scalar) of the update that turns state `step` (0 is the first) into the next.

        `last`, int32 scalar, is the step at which the run ends, where `ends_with_run`; 0: nobody knows yet.
        """
        raise NotImplementedError(f"{type(self).__name__}.Value")

    def Mismatch(self, max_steps: int) -> Mismatch | None:
        """Finds the value of this schedule that does not suit a run of so many steps; None where all do."""
        return None


class WarmupSchedule(LearningRateSchedule):
    """The base of schedules that rise linearly to `value` and then decay, as the subclass says.

    Step t < warmup_steps has the rate value * (t + 1) / warmup_steps: the first is not 0.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("value", 0.1, "The highest rate.", checks.NOT_NEGATIVE)
        p.Define(
            "warmup_steps",
            0,
            "The rate rises linearly over so many steps; 0: it starts at its highest.",
            checks.COUNT,
        )
        return p

    def Value(self, step: tf.Tensor, last: tf.Tensor | None = None) -> tf.Tensor:
        p = self.p
        current = tf.cast(step, tf.float32)
        rate = tf.constant(p.value, tf.float32)
        if p.warmup_steps:
            rate = p.value * tf.minimum((current + 1.0) / float(p.warmup_steps), 1.0)
        return self._Decay(rate, current, last)

    def _Decay(self, rate: tf.Tensor, step: tf.Tensor, last: tf.Tensor | None) -> tf.Tensor:
        """The rate at a step, from the one that the warm-up alone would have; float32 scalars. `last`: see Value.

        It is the same until the warm-up is over.
        """
        raise NotImplementedError(f"{type(self).__name__}._Decay")


class Constant(WarmupSchedule):
    """`value`, after the warm-up."""

    def _Decay(self, rate: tf.Tensor, step: tf.Tensor, last: tf.Tensor | None) -> tf.Tensor:
        return rate


class InverseSqrt(WarmupSchedule):
    """value * sqrt(decay_start / step) from step decay_start on, by default from the end of the warm-up."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "decay_start",
            0,
            "The rate is `value` up to this step, then it decays; 0: the end of the warm-up.",
            checks.COUNT,
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if p.decay_start and p.decay_start < p.warmup_steps:
            why = f"must be 0, or at least warmup_steps={p.warmup_steps}: the rate cannot rise and decay at once"
            raise checks.ParamError("decay_start", str(p.decay_start), why)

    def _Decay(self, rate: tf.Tensor, step: tf.Tensor, last: tf.Tensor | None) -> tf.Tensor:
        start = float(self.p.decay_start or max(self.p.warmup_steps, 1))
        return rate * tf.math.rsqrt(tf.maximum(step / start, 1.0))


class _ToTheEnd(WarmupSchedule):
    """The base of schedules that decay up to `total_steps`, down to a share of `value`."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "total_steps",
            0,
            "The decay ends at this step, more than warmup_steps; 0: where the run ends, by train.max_steps or by its "
            "budget.",
            checks.COUNT,
        )
        p.Define("final_share", 0.0, "The last rate, as a share of `value`.", checks.SHARE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if p.total_steps and p.total_steps <= p.warmup_steps:
            why = f"must be 0, the end of the run, or more than warmup_steps={p.warmup_steps}"
            raise checks.ParamError("total_steps", str(p.total_steps), why)

    @property
    def ends_with_run(self) -> bool:
        return not self.p.total_steps

    def _Decay(self, rate: tf.Tensor, step: tf.Tensor, last: tf.Tensor | None) -> tf.Tensor:
        p = self.p
        if p.total_steps:
            start = max(self._Start(float(p.total_steps)), float(p.warmup_steps))
            done = (step - start) / float(max(p.total_steps - start, 1))
        elif last is None:
            done = tf.zeros_like(step)
        else:
            end = tf.cast(last, tf.float32)
            start = tf.maximum(self._Start(end), float(p.warmup_steps))
            done = tf.where(end > 0.0, (step - start) / tf.maximum(end - start, 1.0), 0.0)
        falling = self._Fall(rate, tf.clip_by_value(done, 0.0, 1.0))
        return p.final_share * rate + (1.0 - p.final_share) * falling if p.final_share else falling

    def Mismatch(self, max_steps: int) -> Mismatch | None:
        """See LearningRateSchedule: the run and the decay should end together."""
        p = self.p
        if p.total_steps in (0, max_steps):
            return None
        if p.total_steps > max_steps:
            why = f"the run ends at step {max_steps}, before the rate has decayed"
        else:
            rate = p.value * p.final_share
            why = f"from that step to {max_steps} the rate stays at {rate:g}"
        better = max_steps if max_steps > p.warmup_steps else None
        return Mismatch("total_steps", p.total_steps, why, better)

    def _Start(self, total: Any) -> Any:
        """The step at which the decay begins, where it ends at `total`: a number, or a float32 scalar. Not before the
        warm-up is over."""
        return float(self.p.warmup_steps)

    def _Fall(self, rate: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        """The rate, which falls from `rate` at done = 0 to 0 at done = 1."""
        raise NotImplementedError(f"{type(self).__name__}._Fall")


class Cosine(_ToTheEnd):
    """Half a cosine from `value` to final_share * value (Loshchilov and Hutter 2017, without restarts)."""

    def _Fall(self, rate: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        return rate * 0.5 * (1.0 + tf.cos(math.pi * done))


class Linear(_ToTheEnd):
    """A straight line from `value` to final_share * value."""

    def _Fall(self, rate: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        return rate * (1.0 - done)


class WarmupStableDecay(_ToTheEnd):
    """`value` up to the last part of the run, then down with 1 - sqrt (Hu et al. 2024; Haegele et al. 2024).

    A run that stays at `value` may end at any step: one that is stopped early, or that goes on for longer, decays in
    its last part all the same.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("decay_share", 0.1, "The part of the run in which it decays.", checks.SHARE)
        return p

    def _Start(self, total: Any) -> Any:
        return total * (1.0 - self.p.decay_share)

    def _Fall(self, rate: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        return rate * (1.0 - tf.sqrt(done))


class Transformer(LearningRateSchedule):
    """multiplier / sqrt(model_dim) * min(1 / sqrt(t), t / warmup_steps^1.5), t = step + 1 (Vaswani et al. 2017)."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("multiplier", 1.0, "Times the rate of the paper.", checks.NOT_NEGATIVE)
        p.Define(
            "warmup_steps",
            4000,
            "The rate rises linearly over so many steps, then it decays.",
            checks.SIZE,
        )
        p.Define(
            "model_dim", 0, "M, the width of the model; a translation model sets it.", checks.SIZE
        )
        return p

    @classmethod
    def SetModelDim(cls, params: HyperParams, model_dim: int) -> None:
        params.model_dim = model_dim

    def Value(self, step: tf.Tensor, last: tf.Tensor | None = None) -> tf.Tensor:
        p = self.p
        t = tf.cast(step, tf.float32) + 1.0
        shape = tf.minimum(tf.math.rsqrt(t), t * float(p.warmup_steps) ** -1.5)
        return p.multiplier * float(p.model_dim) ** -0.5 * shape


class SqrtDecay(LearningRateSchedule):
    """multiplier / sqrt(max(step, constant_steps)): constant at first, then a square-root decay. No warm-up.

    This is how Lingvo reads "learning rate 1.0 with square-root decay after 10k steps", GShard's
    recipe: the 1.0 is the multiplier, and the rate starts at 1 / sqrt(10000) = 0.01. Adafactor's rate
    is relative to the size of a weight, so that a literal 1.0 would replace the weights at each of the
    first steps. `InverseSqrt` with value=1.0, decay_start=10000 takes the sentence literally.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("multiplier", 1.0, "Over the square root.", checks.NOT_NEGATIVE)
        p.Define(
            "constant_steps",
            10_000,
            "The rate is constant for so many steps; 1 or more.",
            checks.SIZE,
        )
        return p

    def Value(self, step: tf.Tensor, last: tf.Tensor | None = None) -> tf.Tensor:
        clock = tf.maximum(tf.cast(step, tf.float32), float(self.p.constant_steps))
        return self.p.multiplier * tf.math.rsqrt(clock)
