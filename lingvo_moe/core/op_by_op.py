"""Which kernels are in use, under the names that code for decoding still has; see core/kernels/."""

import contextlib

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import tensorflow, xla


def running_op_by_op(value: bool = True) -> contextlib.AbstractContextManager[None]:
    """Traces with TensorFlow's own kernels, or with XLA's."""
    return kernels.using(tensorflow if value else xla)


def is_op_by_op() -> bool:
    """Whether TensorFlow's own kernels are in use."""
    return kernels.current() is tensorflow


def rounded_alike(fn, x: tf.Tensor) -> tf.Tensor:
    """See `Kernels.batch_independent`."""
    return kernels.current().batch_independent(fn, x)
