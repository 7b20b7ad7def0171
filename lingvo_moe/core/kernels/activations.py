"""The functions between a layer's products, by the names that parameters have.

A new one is an entry of `ACTIVATIONS`: layers, experts, both sets of kernels, packed decoding and counts of operations
read that table alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class Activation:
    """An elementwise function of the products of a feed-forward layer's input.

    Attributes:
        function: of the input's product with wi; if gated, of its product with wi_gate and of that with wi.
        flops: about how many operations it takes for each element.
        gated: whether there is a second product (Shazeer 2020, "GLU Variants Improve Transformer").
    """

    function: Callable[..., tf.Tensor]
    flops: int
    gated: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights [M,H] whose products the function takes, in its order."""
        return ("wi_gate", "wi") if self.gated else ("wi",)

    @property
    def products(self) -> int:
        """The number of products with weights of a feed-forward layer, the last one included."""
        return len(self.weights) + 1


def _geglu(gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.nn.gelu(gate) * x


def _swiglu(gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.nn.silu(gate) * x


ACTIVATIONS: Mapping[str, Activation] = {
    "identity": Activation(tf.identity, 0),
    "relu": Activation(tf.nn.relu, 1),
    "relu6": Activation(tf.nn.relu6, 2),
    "sigmoid": Activation(tf.math.sigmoid, 4),
    "tanh": Activation(tf.math.tanh, 7),
    "gelu": Activation(tf.nn.gelu, 15),
    "silu": Activation(tf.nn.silu, 5),
    "geglu": Activation(_geglu, 16, gated=True),
    "swiglu": Activation(_swiglu, 6, gated=True),
}
