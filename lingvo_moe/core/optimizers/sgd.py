"""Stochastic gradient descent with momentum. A slot has the letters of its variable."""

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.base_optimizer import BaseOptimizer, Numbers, slot_spec


class Sgd(BaseOptimizer):
    """Gradient descent, with the recipe of residual networks as defaults.

    For a gradient g of a weight w:

    * g' = g + weight_decay * w, where w decays.
    * velocity v = momentum * v + g'.
    * the weight loses rate * v, or with `nesterov` rate * (momentum * v + g').
    """

    DECOUPLED = False
    ELEMENTWISE = True

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("momentum", 0.9, "The share of the velocity that a step keeps.", checks.SHARE)
        p.Define("nesterov", False, "Whether the step looks ahead along the velocity.")
        return p.Set(weight_decay=1e-4)

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        if self.p.nesterov and not self.p.momentum:
            why = "has no effect without momentum; set momentum, or leave it out"
            raise checks.ParamError("nesterov", "True", why)

    def _SlotSpecs(self, spec: VariableSpec) -> NestedMap:
        return NestedMap(velocity=slot_spec(spec, "velocity")) if self.p.momentum else NestedMap()

    def _UpdateOne(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        grad: tf.Tensor,
        slot: NestedMap,
        numbers: Numbers,
    ) -> tuple[kernels.Delta, NestedMap]:
        p = self.p
        if not p.momentum:
            return kernels.DenseDelta(numbers.rate * grad), NestedMap()
        velocity = p.momentum * slot.velocity + grad
        direction = p.momentum * velocity + grad if p.nesterov else velocity
        return kernels.DenseDelta(numbers.rate * direction), NestedMap(velocity=velocity)
