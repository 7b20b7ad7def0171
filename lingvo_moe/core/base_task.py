"""BaseTask: a model with a loss, and the training step that is lowered, planned and run.

The step is one pure function, `(state, batch) -> (state, metrics)`. The state is explicit:
NestedMap(theta, slots, step, skipped).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from lingvo_moe.core import checks, kernels, randomness
from lingvo_moe.core.artifacts import RunArtifacts
from lingvo_moe.core.base_input import BaseInput
from lingvo_moe.core.base_layer import BaseLayer, VariableSpec, name_scope, scoped
from lingvo_moe.core.hyperparams import InstantiableParams
from lingvo_moe.core.hyperparams import Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.step import Step


class TaskError(ValueError):
    """A task and an input that do not fit each other, or a request that a task does not serve."""


@dataclass(frozen=True)
class NamedRows:
    """A dimension of a variable whose elements have names, as an embedding's rows have those of a vocabulary.

    `--init_from` finds such rows of another run by their names.

    Attributes:
        kind: what has the names, in the plural, for messages and RowNames: 'source pieces'.
        dim: the dimension.
        sized_by: how the names of the parameters that set its size end, e.g. 'vocab_size'.
    """

    kind: str
    dim: int
    sized_by: str


class BaseTask(BaseLayer):
    """A layer whose `FProp(theta, batch, seed)` returns `(loss, metrics)`.

    `metrics` is a NestedMap of float32 tensors: scalars, [L] by layer, or [L,E] by layer and expert.
    `metrics.<UNIT>` is the number of units in the batch that count.

    Variables that are not trainable have no gradient. Where `metrics.updates` is there, a NestedMap
    by the paths of such variables (`VariableSpec.path`), it holds their values after the step; it is
    no metric, and TrainStep takes it out.

    The class and its methods also say what the trainer and the planner need: see "the contract" below.
    """

    # The metric that counts what a step processes. Speeds are in these units: 'tokens', 'images'.
    UNIT: ClassVar[str] = "examples"
    # The parameters that the dimensions of an einsum letter come from, e.g. {"E": ("task.num_experts",)}.
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {"B": ("input.batch_size",)}
    # The letters of SIZES which are sharded only over a mesh axis that divides their size.
    DIVIDED: ClassVar[str] = "B"

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

    # --- the contract: what trainer and planner ask of a task beside its step

    @classmethod
    def ConfigureInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """Sets in the Params of the input what the task, by its Params, needs of batches; called
        when all overrides are applied."""

    @classmethod
    def CheckInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """Raises TaskError where the Params of the task and those of the input do not agree; called
        before anything is built."""

    @classmethod
    def Shrink(cls, task: HyperParams, inputs: HyperParams, mesh: Mesh) -> None:
        """Sets sizes in the Params of the task and of the input to the smallest ones that a mesh divides, for
        `tools.verify`; what is computed stays as it is, in float32.

        Raises:
            TaskError: the task does not say how it is shrunk.
        """
        del task, inputs, mesh
        raise TaskError(f"{cls.__name__} cannot be verified: it has no Shrink(task, inputs, mesh)")

    def SampleBatch(self, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
        """A batch of NumPy arrays as the input gives them, made up, for `tools.verify`.

        Raises:
            TaskError: the task does not say what a batch may hold.
        """
        del inputs, rng
        name = type(self).__name__
        raise TaskError(f"{name} cannot be verified: it has no SampleBatch(inputs, rng)")

    def CheckData(self, inputs: BaseInput) -> None:
        """Raises TaskError where the data of an input, after Prepare, does not suit the task."""

    def BatchCounts(self, batch: NestedMap) -> dict[str, int]:
        """What a full batch holds, from its ArraySpecs, by name. The last number counts UNITs, padding
        included."""
        return {self.UNIT: batch.Flatten()[0].shape[0]}

    def FlopsByPart(self, batch: NestedMap) -> dict[str, int]:
        """Floating-point operations of a forward pass over a full batch, from its ArraySpecs, by part of the
        model. Empty where the task does not say."""
        del batch
        return {}

    def StepFlops(self, batch: NestedMap) -> int:
        """Model FLOPs of a training step over a full batch: three times those of the forward pass, since the backward
        pass has two products for each of its. What is computed again in the backward pass does not count."""
        return 3 * sum(self.FlopsByPart(batch).values())

    def LeastActivationBytes(self, batch: NestedMap) -> int:
        """A lower bound of the memory that the activations of a full batch need, on all devices together."""
        del batch
        return 0

    def SizeParams(self, path: str, letter: str) -> tuple[str, ...]:
        """The parameters that a dimension of the variable at a path comes from, by its letter."""
        del path
        return self.SIZES.get(letter, ())

    def NamedRows(self) -> dict[str, NamedRows]:
        """The variables that have rows with names, by their paths in theta."""
        return {}

    def RowNames(self, kind: str, artifacts: RunArtifacts) -> list[str]:
        """The names of the rows of one NamedRows.kind, in order, from what a run keeps of its input.

        Raises:
            TaskError: the artifacts do not say.
        """
        raise TaskError(f"{self.path}: no rows are named after {kind!r}")

    def DecodeStep(self, inputs: BaseInput) -> Step:
        """One step of decoding a batch of the input's size, for the planner.

        Raises:
            TaskError: this task decodes nothing.
        """
        raise TaskError(f"{self.path}: {type(self).__name__} decodes nothing")

    def ProgressNote(self, metrics: NestedMap) -> str:
        """What the progress line says of a step's metrics (NumPy) beside loss and speed; '' for nothing."""
        del metrics
        return ""

    def MetricLayers(self) -> dict[str, list[str]]:
        """What the rows of [L,...] metrics are: for the beginning of a metric's path, the L names of
        the layers."""
        return {}

    # --- the step

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

    @scoped
    def EvalStep(self, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The metrics of FProp without anything random and without dropped tokens."""
        return self.FProp(theta, batch, seed=None)[1]

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
