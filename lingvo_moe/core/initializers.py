"""Initial values of variables: descriptions (`WeightInit`), from which a program computes tensors."""

import abc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.config import checks

_METHODS = ("constant", "uniform", "gaussian", "truncated_gaussian", "permutation")


@dataclass(frozen=True)
class WeightInit:
    """The distribution of a variable's initial values."""

    # One of constant, uniform (in [-scale, scale]), gaussian and truncated_gaussian (standard deviation `scale`), and
    # permutation (of 0 to n - 1, times `scale`, along the last dimension).
    method: str
    scale: float  # see `method`

    def __post_init__(self) -> None:
        checks.check_one_of("WeightInit: method", self.method, _METHODS)

    @property
    def is_random(self) -> bool:
        """Whether the value depends on the seed."""
        return self.method != "constant"

    @classmethod
    def Constant(cls, value: float = 0.0) -> "WeightInit":
        return cls("constant", value)

    @classmethod
    def Uniform(cls, scale: float = 1.0) -> "WeightInit":
        return cls("uniform", scale)

    @classmethod
    def Gaussian(cls, scale: float = 1.0) -> "WeightInit":
        return cls("gaussian", scale)

    @classmethod
    def TruncatedGaussian(cls, scale: float = 1.0) -> "WeightInit":
        return cls("truncated_gaussian", scale)

    @classmethod
    def Permutation(cls) -> "WeightInit":
        return cls("permutation", 1.0)

    @classmethod
    def FanIn(cls, fan_in: int) -> "WeightInit":
        """Truncated Gaussian with standard deviation 1/sqrt(fan_in), as every projection here has."""
        return cls("truncated_gaussian", 1 / math.sqrt(fan_in))

    def __call__(self, seed: tf.Tensor, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
        """The initial value, of a static shape; `seed` is int32 [2], or [n, 2] for n stacked
        variables."""
        if self.method == "constant":
            # Depends on the seed, or TensorFlow would compute the full constant on the host while tracing.
            word = tf.reshape(tf.convert_to_tensor(seed, tf.int32), [-1])[0]
            nothing = tf.cast(tf.bitwise.bitwise_xor(word, word), dtype)
            return tf.fill(list(shape), tf.constant(self.scale, dtype) + nothing)
        if self.method == "gaussian":
            value = randomness.normal(seed, shape) * self.scale
        elif self.method == "truncated_gaussian":
            value = randomness.truncated_normal(seed, shape) * self.scale
        elif self.method == "permutation":
            order = tf.argsort(randomness.uniform(seed, shape), stable=True)
            value = tf.cast(order, tf.float32) * self.scale
        else:
            value = (2 * randomness.uniform(seed, shape) - 1) * self.scale
        return tf.cast(value, dtype)


class InitOfVariable(WeightInit, abc.ABC):
    """A WeightInit that needs to know the variable."""

    @abc.abstractmethod
    def OfVariable(self, spec: Any, seed: tf.Tensor) -> tf.Tensor:
        """The initial value of a variable, of its shape and type, from its VariableSpec; `seed` is int32 [2], not yet
        folded with its path."""

    def Check(self, spec: Any) -> None:
        """Raises what `OfVariable` raises of a file that the value comes from, before anything is compiled."""


def check_initial_values(specs: Iterable[Any]) -> None:
    """Raises ParamError where the value of one of these VariableSpecs is to come from a file that does not hold it."""
    for part in (part for spec in specs for part in spec.parts):
        if isinstance(part.init, InitOfVariable):
            part.init.Check(part)
