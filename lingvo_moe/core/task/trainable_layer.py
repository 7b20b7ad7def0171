"""TrainableLayer: a layer with a loss, its training state and its steps, which are lowered, planned and run.

The step is one pure function, `(state, batch) -> (state, metrics)`. The state is explicit:
NestedMap(theta, slots, step, skipped), with `ema` where `ema_decay` is set, and `last_step`, the step at which the run
ends, which the trainer sets, where the learning rate depends on it.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels, randomness
from lingvo_moe.core.base_layer import (
    BaseLayer,
    VariableSpec,
    initial_values,
    name_scope,
    scoped,
)
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.optimizers import moving_average
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.registry import OPTIMIZERS
from lingvo_moe.core.sharding.letters import GRADIENTS, SLOTS, shards
from lingvo_moe.core.state.offload import check_offload, items_of
from lingvo_moe.core.state.state_sharding import weights_in_use

_OPTIMIZER = "task.optimizer"  # where the user sets its parameters, whatever the task's name


class TaskError(ValueError):
    """Raised if a task and its input do not match, or if a task does not support a request."""


class TrainableLayer(BaseLayer):
    """A layer with an optimizer, whose `FProp(theta, batch, seed)` returns `(loss, metrics)`; see BaseTask.

    All that training and evaluation compute follows here from what the task says; no task overrides it.
    """

    UNIT: ClassVar[str]  # see BaseTask
    HELD_OUT_METRICS: ClassVar[tuple[str, ...]]  # see BaseTask

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("optimizer", Adafactor.Params(), "How gradients change theta.", choices=OPTIMIZERS)
        p.Define(
            "ema_decay",
            0.0,
            "The share that an exponential moving average of the weights keeps at a step, e.g. 0.999, for evaluation "
            "and export; 0: no average.",
            checks.SHARE,
        )
        p.Define(
            "clip_gradient_norm",
            0.0,
            "Gradients are scaled to at most this global norm; 0: never.",
            checks.NOT_NEGATIVE,
        )
        p.Define(
            "seed", 1234, "The seed of initial values, dropout and random routing.", checks.SEED
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        optimizer = self.p.optimizer.Copy().Set(offload=self.p.offload)
        if "model_dim" in self.p:
            rate = optimizer.learning_rate
            rate.cls.SetModelDim(rate, self.p.model_dim)
        try:
            self.optimizer = optimizer.Instantiate()
        except ParamError as e:
            raise e.Within(_OPTIMIZER) from None

    # --- the state

    def StateSpecs(self) -> NestedMap:
        """VariableSpecs of the complete state, in its structure."""
        theta, updated = self.VariableSpecs(), self._UpdatedSpecs()
        specs = NestedMap(
            theta=theta,
            slots=self._SlotSpecs(updated),
            step=_counter("step"),
            skipped=_counter("skipped"),
        )
        if self.optimizer.learning_rate.ends_with_run:
            specs.last_step = _counter("last_step")
        if self.p.ema_decay:
            specs.ema = moving_average.average_specs(updated)
        return specs

    def _UpdatedSpecs(self) -> NestedMap:
        """VariableSpecs, sharded as the weights are while they are updated."""
        specs = self.VariableSpecs()
        sharded = shards(self.p.shard_state, SLOTS)
        return specs.Transform(VariableSpec.OverCopies) if sharded else specs

    def GradientSpecs(self) -> NestedMap:
        """VariableSpecs, sharded as the gradients are."""
        sharded = shards(self.p.shard_state, GRADIENTS)
        return self._UpdatedSpecs() if sharded else self.VariableSpecs()

    @scoped
    def InUse(self, theta: NestedMap) -> NestedMap:
        """The weights of a state as FProp takes them: those outside of stacks are gathered, if the state holds parts.

        A stack gathers its weights layer by layer (layers/repeat.py).
        """
        if not shards(self.p.shard_state, GRADIENTS):
            return theta
        return weights_in_use(theta, self.VariableSpecs(), self.GradientSpecs())

    def _SlotSpecs(self, theta: NestedMap) -> NestedMap:
        try:
            slots = self.optimizer.SlotSpecs(theta)
        except ParamError as e:
            raise e.Within(_OPTIMIZER) from None
        averaged, pipelined = bool(self.p.ema_decay), self.PipelineParts() is not None
        check_offload(self.p.offload, self, theta.Flatten(), slots.Flatten(), averaged, pipelined)
        return slots

    def InitState(self, global_seed: tf.Tensor) -> NestedMap:
        """The state before step 0. `global_seed` is an int32 scalar; engines compile this, sharded."""
        seed = randomness.make_seed(global_seed, 0)
        return self.WithCopies(initial_values(self.StateSpecs(), seed))

    def Warnings(self, max_steps: int) -> list[str]:
        """Returns warnings about parameters that do not suit a run of so many steps, and how to change them."""
        found = self.optimizer.learning_rate.Mismatch(max_steps)
        if found is None:
            return []
        where = f"{_OPTIMIZER}.learning_rate.{found.name}"
        warning = f"{where}={found.value}: {found.why}"
        if found.better is None:
            return [warning]
        remedy = f"--model_params_override='{where}={found.better}'"
        return [f"{warning}; {remedy} ends both together"]

    @scoped
    def WithCopies(self, state: NestedMap) -> NestedMap:
        """Returns the state before step 0, with its master weights and moving averages copied from `state.theta`."""
        specs = self._UpdatedSpecs()
        slots = self.optimizer.WithMasters(state.slots, state.theta, specs)
        new = NestedMap(state, slots=slots)
        if self.p.ema_decay:
            new.ema = moving_average.first_average(state.theta, specs)
        return new

    # --- the step

    def TrainStep(self, state: NestedMap, batch: NestedMap) -> tuple[NestedMap, NestedMap]:
        """One step of training.

        If the loss or the gradient norm is not finite, theta, slots and ema keep their values and
        `skipped` is incremented. The step counter is incremented anyway, so that the next step has another batch
        and another seed.

        Returns:
            The new state, and the metrics: those of FProp, with `grad_norm`, `learning_rate` and
                `skipped` (float32 scalars).
        """
        seed = randomness.make_seed(self.p.seed, state.step)
        loss, metrics, grads = self.Differentiate(
            state.theta, lambda: self.FProp(self.InUse(state.theta), batch, seed=seed)
        )
        updates = metrics.pop("updates", NestedMap())
        with name_scope("optimizer"):
            return self.Apply(state, loss, metrics, grads, updates)

    def Differentiate(
        self, weights: NestedMap, compute: Callable[[], tuple[tf.Tensor, NestedMap]]
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """Loss and metrics as `compute` returns them from `weights` (theta), and the gradients, as Gradients."""
        leaves = [w for w, spec in weights.Zip(self.VariableSpecs()) if spec.trainable]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            loss, metrics = self._LossAndMetrics(compute())
        return loss, metrics, self.Gradients(weights, tape.gradient(loss, leaves))

    def Gradients(
        self, weights: NestedMap, grads: Sequence[tf.Tensor | tf.IndexedSlices | None]
    ) -> NestedMap:
        """Packs the tape's gradients into theta's structure, as dense tensors; None for non-trainable variables."""
        out: list[tf.Tensor | None] = []
        rest = iter(grads)
        for path, spec in self.VariableSpecs().FlattenItems():
            if not spec.trainable:
                out.append(None)
                continue
            grad = next(rest)
            if grad is None:
                raise ValueError(f"{self.path}: the loss does not depend on variable {path!r}")
            with name_scope(f"gradient_tape.{spec.path}"):  # where sparse rows are summed
                out.append(tf.convert_to_tensor(grad))
        return weights.Pack(out)

    def Apply(
        self,
        state: NestedMap,
        loss: tf.Tensor,
        metrics: NestedMap,
        grads: NestedMap,
        updates: NestedMap,
    ) -> tuple[NestedMap, NestedMap]:
        """The state after a step with these gradients and updates; see TrainStep."""
        theta, slots, optimizer_metrics = self.optimizer.Update(
            state,
            grads,
            self._UpdatedSpecs(),
            self.p.clip_gradient_norm,
            tf.math.is_finite(loss) if items_of(self.p.offload) else None,
        )
        theta = self._WithUpdates(theta, updates)
        new = NestedMap(theta=theta, slots=slots)
        if self.p.ema_decay:
            updates_before = state.step - state.skipped
            new.ema = moving_average.next_average(
                state.ema, theta, self.VariableSpecs(), self.p.ema_decay, updates_before
            )
        finite = tf.math.is_finite(loss) & tf.math.is_finite(optimizer_metrics.grad_norm)
        kept = _where(finite, new, state, self.optimizer.Settled(self._UpdatedSpecs()))
        kept.step = state.step + 1
        if "last_step" in state:
            kept.last_step = state.last_step
        kept.skipped = state.skipped + tf.cast(~finite, tf.int32)
        metrics.update(optimizer_metrics, skipped=tf.cast(kept.skipped, tf.float32))
        return kept, metrics

    def _WithUpdates(self, theta: NestedMap, updates: NestedMap) -> NestedMap:
        """Returns theta with the values of non-trainable variables replaced by those in `updates`, by path."""
        by_path = dict(updates.FlattenItems())
        out = []
        for spec, weight in self.VariableSpecs().Zip(theta):
            if spec.trainable or spec.path not in by_path:
                out.append(weight)
                continue
            new = by_path.pop(spec.path)
            out.append(tf.ensure_shape(tf.cast(tf.stop_gradient(new), weight.dtype), weight.shape))
        if by_path:
            names = ", ".join(by_path)
            raise ValueError(f"{self.path}: {names}: only what has trainable=False is updated")
        return theta.Pack(out)

    def _LossAndMetrics(self, result: Any) -> tuple[tf.Tensor, NestedMap]:
        """The loss and the metrics that FProp returned. Raises TaskError where these are not what it returned."""
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], NestedMap):
            return result
        count = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise TaskError(
            f"{type(self).__name__}.FProp returned a {type(result).__name__}{count}; it has to return "
            "(loss, metrics), a scalar and a NestedMap"
        )

    def Terms(
        self, loss: tf.Tensor, metrics: NestedMap, shares: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """Loss and metrics of a micro-batch, means over its UNITs, as the terms of MicroBatchTerms."""
        share, whole = shares[self.UNIT], (self.UNIT, "updates")
        scaled = NestedMap({name: m for name, m in metrics.items() if name not in whole})
        scaled = scaled.Transform(lambda metric: metric * share)
        scaled.update({name: metrics[name] for name in whole if name in metrics})
        return loss * share, scaled

    # --- evaluation

    @scoped
    def EvalStep(self, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """Returns the metrics of FProp with nothing random and no token dropped."""
        return self._LossAndMetrics(self.FProp(theta, batch, seed=None))[1]

    def HeldOutStep(self, weights: NestedMap, batch: NestedMap) -> NestedMap:
        """Returns the HELD_OUT_METRICS of a held-out batch, and how many UNITs it has.

        `weights` are theta, or its moving average, whose types may be wider.
        """
        theta = map_structure(
            lambda weight, spec: tf.cast(weight, spec.dtype), weights, self.VariableSpecs()
        )
        metrics = self.EvalStep(self.InUse(theta), batch)
        return NestedMap({name: metrics[name] for name in (*self.HELD_OUT_METRICS, self.UNIT)})


def _where(
    finite: tf.Tensor, new: NestedMap, old: NestedMap, settled: Collection[str]
) -> NestedMap:
    """Selects the parts of the state that `new` holds: from `new` if `finite` or where settled, else from `old`."""
    old = NestedMap({name: old[name] for name in new})
    found = kernels.current().select(finite, new.Flatten(), old.Flatten())
    items = zip(new.FlattenItems(), found, strict=True)
    return new.Pack([x if path in settled else y for (path, x), y in items])


def _counter(name: str) -> VariableSpec:
    return VariableSpec(
        path=name, shape=(), dtype="int32", letters="", init=WeightInit.Constant(0), split=()
    )
