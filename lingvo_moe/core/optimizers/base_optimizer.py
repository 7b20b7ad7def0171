"""BaseOptimizer: new weights and slots from old ones and gradients, as a pure function.

Letters in slot specs are those of the variables; a slot is sharded like its variable. Where a variable's spec has
`free_dims`, no mesh axis holds copies of its slots, and each device updates its part of the weight.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import VariableSpec, name_scope
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.optimizers.by_layer import (
    AppliedByLayer,
    is_by_layer,
    squares_by_layer,
    update_by_layer,
)
from lingvo_moe.core.optimizers.registry import SCHEDULES, elementwise_optimizers
from lingvo_moe.core.optimizers.schedules import SqrtDecay
from lingvo_moe.core.optimizers.slow_variables import define_slow_variables, slow_variables
from lingvo_moe.core.optimizers.weight_decay import (
    DecayedDelta,
    check_weight_decay,
    decays,
    define_weight_decay,
)
from lingvo_moe.core.sharding.letters import DEVICE, HOST
from lingvo_moe.core.state.offload import of_slot
from lingvo_moe.core.state.state_sharding import in_parts

MASTER = "master"  # the slot with the float32 value of a narrower weight


@dataclass(frozen=True)
class Numbers:
    """The scalars that the updates of all variables share in a step."""

    rate: tf.Tensor  # the learning rate
    step: tf.Tensor  # the number of the step
    scale: tf.Tensor | None  # the factor of the gradients; None: 1
    finite: tf.Tensor | None  # see BaseOptimizer.Update


class BaseOptimizer:
    """The base of optimizers. Subclasses implement `_SlotSpecs` and `_UpdateOne` for one variable.

    Weight decay is decoupled (Loshchilov and Hutter 2019): beside its update, a weight loses
    rate * weight_decay * weight. Where DECOUPLED is False, weight_decay * weight is added to the gradient instead, so
    that the optimizer's statistics see it. `weight_decay.py` says which variables decay.

    Of a variable in bfloat16 (or float16) the slots hold a copy in float32, MASTER (mixed precision, Micikevicius et
    al. 2018, section 3.1). It is the one that is updated, and the weight is its value rounded: steps that are too small
    for the narrow type add up.

    Attributes:
        DECOUPLED: see above.
        PASSES: how often an update goes over gradients and weights, once the norm of all gradients is known.
        ELEMENTWISE: whether the update of an element depends on no other element of its variable. Only such an
            optimizer can update variables that pack others (VariableSpec.packs).
    """

    DECOUPLED: ClassVar[bool] = True
    PASSES: ClassVar[int] = 1
    ELEMENTWISE: ClassVar[bool] = False

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = InstantiableParams(cls)
        p.Define(
            "learning_rate",
            SqrtDecay.Params(),
            "The schedule of the learning rate.",
            choices=SCHEDULES,
        )
        how = (
            "Each step takes this share of a weight, times the learning rate; 0: none."
            if cls.DECOUPLED
            else "Times the weight, added to its gradient; 0: none."
        )
        define_weight_decay(p, how)
        define_slow_variables(p)
        p.Define(
            "offload",
            "none",
            "What is in the memory of the hosts: see core/state/offload.py.",
            checks.OFFLOAD,
            parent_sets="the model sets it from train.offload",
        )
        return p

    def __init__(self, params: InstantiableParams):
        self.p = params.Copy().Freeze()
        check_weight_decay(self.p)
        try:
            self.learning_rate = self.p.learning_rate.Instantiate()
        except ParamError as e:
            raise e.Within("learning_rate") from None

    def SlotSpecs(self, specs: NestedMap) -> NestedMap:
        """The optimizer's state for variables of these specs: a NestedMap of float32 slots for each,
        empty for those that are not trainable.

        Raises:
            ParamError: a pattern of `decay_include`, `decay_exclude` or `slow` that matches no variable.
            ValueError: a variable packs others, but this optimizer is not ELEMENTWISE.
        """
        self.Decays(specs)
        self.Slow(specs)
        packed = next((spec for spec in specs.Flatten() if spec.packs and spec.trainable), None)
        if packed is not None and not self.ELEMENTWISE:
            raise ValueError(
                f"optimizer {type(self).__name__}: {packed.path} packs the weights of a pipeline's stage into one "
                "vector, and this optimizer's update depends on their shapes; choose "
                f"{elementwise_optimizers()}"
            )
        return specs.Transform(self._SlotsFor)

    def Decays(self, specs: NestedMap) -> dict[str, bool]:
        """Says of each trainable variable, by its spec's path, whether it decays. Raises ParamError as SlotSpecs."""
        return decays(specs, self.p)

    def Slow(self, specs: NestedMap) -> frozenset[str]:
        """The paths of variables with `slow_share` of the learning rate. Raises ParamError as SlotSpecs."""
        return slow_variables(specs, self.p)

    def WithMasters(self, slots: NestedMap, theta: NestedMap, specs: NestedMap) -> NestedMap:
        """The slots with the values of weights theta in MASTER, where there are such slots."""
        slots_of = self._SlotsOf(specs, slots)
        for slot, weight in zip(slots_of, theta.Flatten(), strict=True):
            if MASTER in slot:
                slot[MASTER] = tf.cast(weight, tf.float32)
        return slots.Pack([x for slot in slots_of for x in slot.Flatten()])

    def Update(
        self,
        state: NestedMap,
        grads: NestedMap,
        specs: NestedMap,
        max_grad_norm: float = 0.0,
        finite: tf.Tensor | None = None,
    ) -> tuple[NestedMap, NestedMap, NestedMap]:
        """One step. Pure: nothing is assigned.

        Args:
            state: theta, the weights; slots, as SlotSpecs lays them out; and step, int32 scalar, 0 at the first update;
                also last_step, where the schedule ends with the run. Other entries are ignored.
            grads: in theta's structure; tf.IndexedSlices are made dense; None for variables that are not
                trainable.
            specs: theta's VariableSpecs, as SlotSpecs got them; `stack_dims` keeps the layers of a `repeat` apart.
            max_grad_norm: gradients are first scaled to at most this global norm; 0 leaves them alone.
            finite: bool scalar; False, or a norm of the gradients that is not finite: variables with slots in the
                host's memory keep their values and slots. None: there are no such variables.

        Returns:
            New theta (each weight in its own type; weights that are not trainable unchanged), new slots
            (float32), and NestedMap(learning_rate, update_norm, grad_norm) of float32 scalars; update_norm
            leaves out a decoupled weight decay, and grad_norm is the global norm of `grads` as given. Where a
            gradient is not finite the new state is not either: the caller decides which state to keep.

        Raises:
            ValueError: a trainable variable without a gradient, by its path; a negative `max_grad_norm`.
        """
        grads, step = _dense(grads, specs), state.step
        theta = _in_parts(state.theta, specs)
        squares = _squares(grads, specs)
        scale: tf.Tensor | None = None
        if max_grad_norm:
            if max_grad_norm < 0:
                raise ValueError(f"the gradient norm's limit must be positive, got {max_grad_norm}")
            grad_norm = tf.sqrt(tf.add_n(squares))
            scale = max_grad_norm / tf.maximum(grad_norm, max_grad_norm)
        rate = self.learning_rate.Value(step, state.get("last_step"))
        slots_of = self._SlotsOf(specs, state.slots)
        if finite is not None:
            finite &= tf.math.is_finite(tf.add_n(squares))
        numbers = Numbers(rate, step, scale, finite)
        deltas, new_slots = self._Deltas(theta, grads, slots_of, specs, numbers)
        changed = [d for d in deltas if d is not None]
        if not max_grad_norm:
            decoupled = [d.grad_square if self.DECOUPLED else None for d in changed]
            sums = [s if k is None else k for k, s in zip(decoupled, squares, strict=True)]
            grad_norm = tf.sqrt(tf.add_n(sums))
        update_norm = tf.sqrt(tf.add_n([d.SumOfSquares() for d in changed]))
        new_theta = theta.Flatten()
        for i, (delta, slot) in enumerate(zip(deltas, slots_of, strict=True)):
            if delta is not None and MASTER in slot and not isinstance(delta, AppliedByLayer):
                new_slots[i][MASTER] = delta.SubtractFrom(slot[MASTER])
                new_theta[i] = tf.cast(new_slots[i][MASTER], new_theta[i].dtype)
            elif delta is not None:
                new_theta[i] = delta.SubtractFrom(new_theta[i])
        metrics = NestedMap(learning_rate=rate, update_norm=update_norm, grad_norm=grad_norm)
        flat_slots = [x for slot in new_slots for x in slot.Flatten()]
        return _in_parts(theta.Pack(new_theta), specs), state.slots.Pack(flat_slots), metrics

    def _Deltas(
        self,
        theta: NestedMap,
        grads: NestedMap,
        slots: list[NestedMap],
        specs: NestedMap,
        numbers: Numbers,
    ) -> tuple[list[kernels.Delta | None], list[NestedMap]]:
        """The change of each variable, None where it is not trainable, and new slots, MASTER of AppliedByLayer only."""
        deltas: list[kernels.Delta | None] = []
        new_slots: list[NestedMap] = []
        decayed, slow = self.Decays(specs), self.Slow(specs)
        slowly = replace(numbers, rate=numbers.rate * self.p.slow_share) if slow else numbers
        leaves = specs.Zip(theta, grads)
        for (spec, weight, grad), slot in zip(leaves, slots, strict=True):
            delta: kernels.Delta | None = None
            if spec.trainable:
                own = slowly if spec.path in slow else numbers
                of_one = functools.partial(self._Delta, decays=decayed[spec.path], numbers=own)
                slot_specs = self._SlotsFor(spec)
                with name_scope(f"optimizer.{spec.path}"):
                    if is_by_layer(spec, slot_specs):
                        finite = numbers.finite
                        assert finite is not None
                        update = functools.partial(_layer, of_one)
                        delta, slot = update_by_layer(
                            update, (spec, slot_specs), (weight, slot), grad, finite
                        )
                    else:
                        delta, slot = of_one(spec, weight, grad, slot)
            deltas.append(delta)
            new_slots.append(slot)
        return deltas, new_slots

    def _Delta(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        grad: tf.Tensor,
        slot: NestedMap,
        *,
        decays: bool,
        numbers: Numbers,
    ) -> tuple[kernels.Delta, NestedMap]:
        """The change of one variable, and its new slots but for MASTER."""
        weight = tf.cast(slot.get(MASTER, weight), tf.float32)
        if numbers.scale is not None:
            grad *= tf.cast(numbers.scale, grad.dtype)
        grad = tf.cast(grad, tf.float32)
        if decays and not self.DECOUPLED:
            grad += self.p.weight_decay * weight
        delta, slot = self._UpdateOne(spec, weight, grad, slot, numbers)
        if decays and self.DECOUPLED:
            delta = DecayedDelta(delta, numbers.rate * self.p.weight_decay)
        return delta, slot

    def Settled(self, specs: NestedMap) -> frozenset[str]:
        """The paths in NestedMap(theta, slots) of what Update leaves alone itself where the step is not finite."""
        variables = {path: (spec, self._SlotsFor(spec)) for path, spec in specs.FlattenItems()}
        of_host = {
            path: slots for path, (spec, slots) in variables.items() if is_by_layer(spec, slots)
        }
        of_slots = {f"slots.{path}.{name}" for path, slots in of_host.items() for name in slots}
        return frozenset({f"theta.{path}" for path in of_host} | of_slots)

    def _SlotsOf(self, specs: NestedMap, slots: NestedMap) -> list[NestedMap]:
        """The slots of each variable, in the order of the variables."""
        rest = iter(slots.Flatten())
        out = []
        for spec in specs.Flatten():
            layout = self._SlotsFor(spec)
            out.append(layout.Pack([next(rest) for _ in layout.Flatten()]))
        return out

    def _SlotsFor(self, spec: VariableSpec) -> NestedMap:
        if not spec.trainable:
            return NestedMap()
        slots = self._SlotSpecs(spec)
        if tf.as_dtype(spec.dtype).size < 4:
            slots[MASTER] = slot_spec(spec, MASTER)
        if not spec.stack_dims:
            return slots
        there = {name: of_slot(self.p.offload, spec, name == MASTER) for name in slots}
        return NestedMap(
            {name: replace(s, memory=HOST if there[name] else DEVICE) for name, s in slots.items()}
        )

    def _SlotSpecs(self, spec: VariableSpec) -> NestedMap:
        """The slots of one trainable variable."""
        raise NotImplementedError(f"{type(self).__name__}._SlotSpecs")

    def _UpdateOne(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        grad: tf.Tensor,
        slot: NestedMap,
        numbers: Numbers,
    ) -> tuple[kernels.Delta, NestedMap]:
        """(the change of the weight, new slots); weight and gradient, already clipped, are float32."""
        raise NotImplementedError(f"{type(self).__name__}._UpdateOne")


def _layer(
    of_one: Callable[..., tuple[kernels.Delta, NestedMap]],
    spec: VariableSpec,
    weight: tf.Tensor,
    grad: tf.Tensor,
    slot: NestedMap,
) -> tuple[tf.Tensor, NestedMap, tf.Tensor]:
    """The update of one layer, as update_by_layer takes it."""
    delta, new = of_one(spec, weight, grad, slot)
    updated = delta.SubtractFrom(slot.get(MASTER, weight))
    if MASTER in slot:
        new[MASTER] = updated
    return updated, new, delta.SumOfSquares()


def _dense(grads: NestedMap, specs: NestedMap) -> NestedMap:
    """The gradients as tensors. Raises ValueError for trainable variables without one."""
    grads = NestedMap.FromNestedDict(grads)
    missing = [spec.path for spec, grad in specs.Zip(grads) if grad is None and spec.trainable]
    if missing:
        raise ValueError(f"no gradient for {', '.join(missing)}: the loss does not depend on it")
    return _in_parts(
        grads.Transform(lambda g: None if g is None else tf.convert_to_tensor(g)), specs
    )


def _in_parts(tree: NestedMap, specs: NestedMap) -> NestedMap:
    """Weights or gradients, each sharded like its slots."""
    return map_structure(lambda x, spec: x if x is None else in_parts(x, spec), tree, specs)


def _squares(grads: NestedMap, specs: NestedMap) -> list[tf.Tensor]:
    """The sum of squares of each gradient."""
    return [
        squares_by_layer(g, spec)
        if spec.memory == HOST
        else kernels.current().sum_of_squares(tf.cast(g, tf.float32))
        for g, spec in grads.Zip(specs)
        if g is not None
    ]


def slot_spec(spec: VariableSpec, name: str, without: int | None = None) -> VariableSpec:
    """A float32 slot of a variable, starting at zero.

    Args:
        without: the dimension of the variable that the slot lacks.
    """

    def keep(values: Any) -> Any:
        if without is None:
            return values
        return values[:without] + values[without + 1 :]

    packs = tuple(tuple(slot_spec(part, name) for part in row) for row in spec.packs)
    slot = replace(
        spec,
        packs=packs,
        free_dims=(),
        path=f"{spec.path}.{name}",
        shape=keep(spec.shape),
        letters=keep(spec.letters),
        split=keep(spec.split),
        dtype="float32",
        init=WeightInit.Constant(0.0),
    )
    return slot.OverCopies() if spec.free_dims else slot
