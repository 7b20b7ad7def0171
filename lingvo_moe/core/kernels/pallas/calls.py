"""Kernels that JAX has for TPUs, written in Pallas, in programs of TensorFlow.

TensorFlow carries such a kernel into its program as a module of its own. The TPU compiler compiles it, also for chips
that are not there; we had no TPU to run one on. Tests run them interpreted, by XLA on a CPU.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from lingvo_moe.core.tensors import custom_gradient

if TYPE_CHECKING:
    import jax

INTERPRETED = False  # True in tests: kernels as operations that a CPU has


def call(fn: Callable[..., "jax.Array"], *inputs: tf.Tensor) -> tf.Tensor:
    """fn(inputs), a function of JAX. Gradients, which JAX computes, flow to the floats among the inputs."""
    import jax

    places = [i for i, x in enumerate(inputs) if x.dtype.is_floating]

    def forward(*inputs: "jax.Array") -> tuple["jax.Array", Any]:
        def of_floats(*floats: "jax.Array") -> "jax.Array":
            by_place = dict(zip(places, floats, strict=True))
            return fn(*(by_place.get(i, x) for i, x in enumerate(inputs)))

        return jax.vjp(of_floats, *(inputs[i] for i in places))

    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype.as_numpy_dtype) for x in inputs]
    residuals = jax.tree.structure(jax.eval_shape(forward, *specs)[1])

    def backward(dy: "jax.Array", *leaves: "jax.Array") -> tuple:
        return jax.tree.unflatten(residuals, leaves)(dy)

    @custom_gradient
    def run(*inputs: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        y, *leaves = _of_jax(lambda *values: jax.tree.leaves(forward(*values)))(*inputs)

        def grad(dy: tf.Tensor) -> list[tf.Tensor | None]:
            grads = dict(zip(places, _of_jax(backward)(dy, *leaves), strict=True))
            return [grads.get(i) for i in range(len(inputs))]

        return y, grad

    return run(*inputs)


def _of_jax(fn: Callable) -> Callable:
    from jax.experimental import jax2tf

    return jax2tf.convert(
        fn,
        with_gradient=False,
        native_serialization_platforms=["cpu" if INTERPRETED else "tpu"],
        # TensorFlow lowers for the platform that it has.
        native_serialization_disabled_checks=[jax2tf.DisabledSafetyCheck.platform()],
    )
