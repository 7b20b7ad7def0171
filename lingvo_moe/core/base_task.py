"""BaseTask: a model with a loss, and the training step that is lowered, planned and run.

The step is one pure function, `(state, batch) -> (state, metrics)`. The state is explicit:
NestedMap(theta, slots, step, skipped).
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core import checks, kernels, randomness
from lingvo_moe.core.base_layer import BaseLayer, VariableSpec, name_scope
from lingvo_moe.core.hyperparams import InstantiableParams
from lingvo_moe.core.hyperparams import Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor


class BaseTask(BaseLayer):
    """A layer whose `FProp(theta, batch, seed)` returns `(loss, metrics)`.

    Variables that are not trainable have no gradient. Where `metrics.updates` is there, a NestedMap
    by the paths of such variables (`VariableSpec.path`), it holds their values after the step; it is
    no metric, and TrainStep takes it out.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("optimizer", Adafactor.Params(), "How gradients change theta.")
        p.Define(
            "clip_gradient_norm",
            0.0,
            "Gradients are scaled to at most this global norm; 0: never.",
            check=checks.NOT_NEGATIVE,
        )
        p.Define(
            "seed",
            1234,
            "The seed of initial values, dropout and random routing.",
            check=checks.SEED,
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        self.optimizer = self.p.optimizer.Instantiate()

    @classmethod
    def ConfigureInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """Sets in the Params of the input what the task, by its Params, needs of batches; called
        when all overrides are applied."""

    def StateSpecs(self) -> NestedMap:
        """VariableSpecs of the whole state, in its structure."""
        theta = self.VariableSpecs()
        return NestedMap(
            theta=theta,
            slots=self.optimizer.SlotSpecs(theta),
            step=_counter("step"),
            skipped=_counter("skipped"),
        )

    def InitState(self, global_seed: tf.Tensor) -> NestedMap:
        """The state before step 0. `global_seed` is an int32 scalar; engines compile this,
        sharded."""
        seed = randomness.make_seed(global_seed, 0)
        return self.StateSpecs().Transform(lambda spec: spec.Init(seed))

    def TrainStep(self, state: NestedMap, batch: NestedMap) -> tuple[NestedMap, NestedMap]:
        """One step of training.

        Where the loss or the gradient norm is not finite, theta and slots stay as they were and
        `skipped` counts one; the step counter goes on, so that the next batch and seed are other
        ones.

        Returns:
            The new state, and metrics: those of FProp, with `grad_norm`, `learning_rate`, `skipped`
                (float32 scalars).
        """
        seed = randomness.make_seed(self.p.seed, state.step)
        specs = self.VariableSpecs().Flatten()
        leaves = [w for w, spec in zip(state.theta.Flatten(), specs, strict=True) if spec.trainable]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            loss, metrics = self.FProp(state.theta, batch, seed=seed)
        updates = metrics.pop("updates", NestedMap())
        grads = self._Gradients(state.theta, tape.gradient(loss, leaves))
        with name_scope("optimizer"):
            return self._Apply(state, loss, metrics, grads, updates)

    def _Apply(
        self,
        state: NestedMap,
        loss: tf.Tensor,
        metrics: NestedMap,
        grads: NestedMap,
        updates: NestedMap,
    ) -> tuple[NestedMap, NestedMap]:
        """The state after a step with these gradients and updates; see TrainStep."""
        theta, slots, optimizer_metrics = self.optimizer.Update(
            state.theta,
            grads,
            state.slots,
            state.step,
            self.VariableSpecs(),
            self.p.clip_gradient_norm,
        )
        theta = self._WithUpdates(theta, updates)
        finite = tf.math.is_finite(loss) & tf.math.is_finite(optimizer_metrics.grad_norm)
        kept = _where(finite, NestedMap(theta=theta, slots=slots), state)
        skipped = state.skipped + tf.cast(~finite, tf.int32)
        metrics.update(optimizer_metrics, skipped=tf.cast(skipped, tf.float32))
        return (
            NestedMap(
                theta=kept.theta,
                slots=kept.slots,
                step=state.step + 1,
                skipped=skipped,
            ),
            metrics,
        )

    def EvalStep(self, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The metrics of FProp without anything random and without dropped tokens."""
        return self.FProp(theta, batch, seed=None)[1]

    def MetricLayers(self) -> dict[str, list[str]]:
        """What the rows of [L,...] metrics are: for the beginning of a metric's path, the L names of
        the layers."""
        return {}

    def _Gradients(self, theta: NestedMap, grads: Sequence[Any]) -> NestedMap:
        """The tape's gradients, those of trainable variables, as tensors in the structure of theta; None
        for the others."""
        out: list[tf.Tensor | None] = []
        rest = iter(grads)
        for (path, _), spec in zip(
            theta.FlattenItems(), self.VariableSpecs().Flatten(), strict=True
        ):
            if not spec.trainable:
                out.append(None)
                continue
            grad = next(rest)
            if grad is None:
                raise ValueError(f"{self.path}: the loss does not depend on variable {path!r}")
            with name_scope(f"gradient_tape.{spec.path}"):  # where sparse rows are summed
                out.append(tf.convert_to_tensor(grad))
        return theta.Pack(out)

    def _WithUpdates(self, theta: NestedMap, updates: NestedMap) -> NestedMap:
        """Theta with the next values of variables that are not trainable, by their specs' paths."""
        by_path = dict(updates.FlattenItems())
        out = []
        for spec, weight in zip(self.VariableSpecs().Flatten(), theta.Flatten(), strict=True):
            if spec.trainable or spec.path not in by_path:
                out.append(weight)
                continue
            new = by_path.pop(spec.path)
            out.append(tf.ensure_shape(tf.cast(tf.stop_gradient(new), weight.dtype), weight.shape))
        if by_path:
            raise ValueError(
                f"{self.path}: {', '.join(by_path)}: an update of what is not a variable with "
                "trainable=False"
            )
        return theta.Pack(out)


def updates_of(*extras: NestedMap) -> NestedMap:
    """NestedMap(updates=...) for a task's metrics, joined from layers' extras; empty where none has any."""
    updates = NestedMap()
    for layer in extras:
        for path, value in layer.get("updates", NestedMap()).FlattenItems():
            updates.Set(path, value)
    return NestedMap(updates=updates) if updates else NestedMap()


def _where(finite: tf.Tensor, new: NestedMap, old: NestedMap) -> NestedMap:
    """The theta and slots of one state or of the other."""
    old = NestedMap(theta=old.theta, slots=old.slots)
    return new.Pack(kernels.current().select(finite, new.Flatten(), old.Flatten()))


def _counter(name: str) -> VariableSpec:
    return VariableSpec(
        path=name, shape=(), dtype="int32", letters="", init=WeightInit.Constant(0), split=()
    )
