"""Weight decay: which variables decay, and how a decoupled decay joins an update.

Letters: E expert, U task, V vocabulary.
"""

from dataclasses import dataclass

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.config.param_text import shown
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.variable_patterns import matched, wholly

_MASK = ("decay_min_dims", "decay_include", "decay_exclude")
# The first letter of tables with a row for each id: embeddings.
_TABLES = "UV"


def define_weight_decay(p: InstantiableParams, how: str) -> None:
    """Defines `weight_decay` and the parameters of its mask.

    `how` is the help of `weight_decay`: how it enters the update.
    """
    patterns = checks.ListOf(checks.TEXT, "a list of patterns")
    p.Define("weight_decay", 0.0, how, checks.NOT_NEGATIVE)
    p.Define(
        "decay_min_dims",
        2,
        "Variables of fewer dimensions do not decay: with 2, no bias and no scale of a normalization.",
        checks.COUNT,
    )
    p.Define(
        "decay_include",
        [],
        "Variables that decay in any case, e.g. ['*embedding*']: patterns of their names.",
        patterns,
    )
    p.Define(
        "decay_exclude",
        [],
        "Variables that do not decay, e.g. ['*.router.*']: patterns of their names.",
        patterns,
    )


def check_weight_decay(p: InstantiableParams) -> None:
    """Raises ParamError for a mask without a weight decay, which would have no effect."""
    for name in _MASK:
        if not p.weight_decay and not p.IsDefault(name):
            why = "has no effect without a weight decay; set weight_decay, or leave it out"
            raise checks.ParamError(name, shown(p.Get(name)), why)


def decays(specs: NestedMap, p: InstantiableParams) -> dict[str, bool]:
    """Says of each trainable variable, by `VariableSpec.path`, whether it decays.

    A variable decays if it has at least `decay_min_dims` dimensions and is no embedding table. Dimensions that count
    the layers of a `repeat`, and a leading one that counts experts, do not count; a bias or a scale
    (`VariableSpec.is_vector`) has one dimension, even where it is 'NK'. `decay_include` adds variables,
    `decay_exclude` removes some: patterns such as '*.wi' of whole paths, in which * stands for any characters.

    Raises:
        ParamError: a pattern that matches no trainable variable, or one of both lists matches the same variable; or
            only some of the variables that another one packs decay.
    """
    trained = [spec for spec in specs.Flatten() if spec.trainable]
    if not p.weight_decay:
        return {spec.path: False for spec in trained}
    parts = [part for spec in trained for part in spec.parts]
    included = matched("decay_include", p.decay_include, trained)
    excluded = matched("decay_exclude", p.decay_exclude, trained)
    both = sorted(included & excluded)
    if both:
        why = f"matches {both[0]}, which decay_include={p.decay_include} matches too"
        raise checks.ParamError("decay_exclude", shown(p.decay_exclude), why)
    decayed = {
        part.path
        for part in parts
        if part.path in included
        or (part.path not in excluded and not is_table(part) and own_dims(part) >= p.decay_min_dims)
    }
    name = "decay_exclude" if p.decay_exclude else "decay_include"
    agreed = wholly(trained, decayed, "decays", (name, p.Get(name)))
    return {spec.path: spec.path in agreed for spec in trained}


def is_table(spec: VariableSpec) -> bool:
    """Whether a variable has a row for each id, as embeddings do."""
    letters = spec.letters[spec.stack_dims :]
    return len(letters) > 1 and letters[0] in _TABLES


def own_dims(spec: VariableSpec) -> int:
    """The dimensions but for those that count layers and a leading one that counts experts; a vector has one."""
    return 1 if spec.is_vector else len(spec.letters[spec.stack_dims :].removeprefix("E"))


@dataclass(frozen=True)
class DecayedDelta:
    """A `kernels.Delta` after which the weight shrinks too: w - update - amount * w."""

    update: kernels.Delta  # the optimizer's
    amount: tf.Tensor  # learning rate times weight decay, float32 scalar

    @property
    def grad_square(self) -> tf.Tensor | None:
        return self.update.grad_square

    def SumOfSquares(self) -> tf.Tensor:
        """The sum of the squares of the update alone, without the decay."""
        return self.update.SumOfSquares()

    def SubtractFrom(self, weight: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(weight, tf.float32)
        return tf.cast(self.update.SubtractFrom(wide) - self.amount * wide, weight.dtype)
