"""Adafactor (Shazeer and Stern 2018): second moments in two vectors instead of a matrix.

Letters follow the variable: for wi 'EMH' the slots are row 'EM' and col 'EH', sharded along E like wi;
for a query's 'MNK' they are row 'MN' and col 'NK', a matrix for each head.
"""

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.base_optimizer import BaseOptimizer, Numbers, slot_spec
from lingvo_moe.core.optimizers.schedules import SqrtDecay


class Adafactor(BaseOptimizer):
    """Adafactor without a first moment.

    For a gradient g at update t = 1, 2, ...:

    * decay: b = min(beta2, 1 - t^-decay_exponent), 0.99 and 0.8 here: the average reaches back over
      all steps at first (no bias correction is needed: b is 0 at t = 1) and over about 100 later.
    * second moment v of g^2 + epsilon1, as the outer product of its row and column means over the
      two largest dimensions (never those that count layers or experts), divided by the mean of both;
      in full where one of them is small, and of a bias or a scale.
    * u = g / sqrt(v), divided by max(1, rms(u) / clip_threshold).
    * the weight loses rate * max(epsilon2, rms(weight)) * u, or rate * u without
      `multiply_by_parameter_scale`.

    There is no first moment (beta1 = 0), so no slot is as large as its weight. Each rms is over one
    variable of one layer: the leading dimensions that count the layers of a `repeat` are kept apart,
    and scanned layers learn exactly as unrolled ones do.
    """

    PASSES = 2  # both rms come before the first step of any element

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "beta2",
            0.99,
            "Upper limit of the second moment's decay; 1.0: none.",
            checks.Number(0, 1, open_low=True),
        )
        p.Define("decay_exponent", 0.8, "The decay rises as 1 - t^-exponent.", checks.POSITIVE)
        p.Define(
            "clip_threshold",
            1.0,
            "Largest root mean square of u; 0: no clipping of updates.",
            checks.NOT_NEGATIVE,
        )
        p.Define("multiply_by_parameter_scale", True, "Steps relative to the weight's size.")
        p.Define("epsilon1", 1e-30, "Added to squared gradients.", checks.POSITIVE)
        p.Define(
            "epsilon2", 1e-3, "The least size of a weight, for its steps.", checks.NOT_NEGATIVE
        )
        p.Define(
            "min_dim_size_to_factor",
            128,
            "Both dimensions must be this large; smaller ones would save little.",
            checks.COUNT,
        )
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if not p.multiply_by_parameter_scale and not p.IsDefault("epsilon2"):
            why = "has no effect with multiply_by_parameter_scale=False; leave it out"
            raise checks.ParamError("epsilon2", str(p.epsilon2), why)

    def _Factored(self, spec: VariableSpec) -> tuple[int, int] | None:
        """The two factored dimensions, in order; None where the second moment is kept in full."""
        dims = [d for d in range(spec.stack_dims, len(spec.shape)) if spec.letters[d] != "E"]
        largest = sorted(dims, key=lambda d: (-spec.shape[d], -d))[:2]
        if (
            spec.is_vector
            or len(largest) < 2
            or min(spec.shape[d] for d in largest) < self.p.min_dim_size_to_factor
        ):
            return None
        return min(largest), max(largest)

    def _SlotSpecs(self, spec: VariableSpec) -> NestedMap:
        dims = self._Factored(spec)
        if dims is None:
            return NestedMap(full=slot_spec(spec, "full"))
        return NestedMap(
            row=slot_spec(spec, "row", without=dims[1]), col=slot_spec(spec, "col", without=dims[0])
        )

    def _UpdateOne(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        grad: tf.Tensor,
        slot: NestedMap,
        numbers: Numbers,
    ) -> tuple[kernels.Delta, NestedMap]:
        p = self.p
        t = tf.cast(numbers.step, tf.float32) + 1.0
        decay = tf.minimum(1.0 - tf.pow(t, -p.decay_exponent), p.beta2)
        recipe = kernels.AdafactorRecipe(
            decay,
            numbers.rate,
            p.epsilon1,
            p.epsilon2,
            p.clip_threshold,
            p.multiply_by_parameter_scale,
            self._Factored(spec),
            spec.stack_dims,
        )
        return kernels.current().adafactor(weight, grad, slot, recipe)


class GShardAdafactor(Adafactor):
    """The recipe of GShard's M4 experiments, each number of it: other defaults may change, these do not."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        return p.Set(
            learning_rate=SqrtDecay.Params().Set(multiplier=1.0, constant_steps=10_000),
            weight_decay=0.0,
            beta2=0.99,
            decay_exponent=0.8,
            clip_threshold=1.0,
            multiply_by_parameter_scale=True,
            epsilon1=1e-30,
            epsilon2=1e-3,
            min_dim_size_to_factor=128,
        )
