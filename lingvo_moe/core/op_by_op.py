"""Whether what is being traced will run operation by operation, by TensorFlow's own kernels.

XLA fuses elementwise operations and lays out what products need; TensorFlow's executor runs each
operation as written, in a pass over memory of its own. Where that costs much, a layer has a second form
for it, of the same values and gradients up to rounding. Programs for XLA never see these forms.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_current: contextvars.ContextVar[bool] = contextvars.ContextVar("op_by_op", default=False)


@contextlib.contextmanager
def running_op_by_op(value: bool = True) -> Iterator[None]:
    """What is traced inside runs operation by operation (or not). Engines enter it."""
    token = _current.set(value)
    try:
        yield
    finally:
        _current.reset(token)


def is_op_by_op() -> bool:
    """See `running_op_by_op`; False where nobody said."""
    return _current.get()


def rounded_alike(fn: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """fn(x) for x [..., 1] and a function of each element, e.g. tf.math.log.

    TensorFlow computes rsqrt, log, reciprocal and the like 16 numbers at a time, and what is left over by
    another algorithm, of other roundings. Where nothing is ever left over, what becomes of a row does not
    depend on how many others there are.
    """
    if not _current.get():
        return fn(x)
    return fn(tf.tile(x, [1] * (x.shape.rank - 1) + [16]))[..., :1]


def fused(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that XLA compiles on its own, gradient included, where all else runs
    operation by operation: for chains of elementwise operations and reductions.

    It must depend on its arguments alone. Arguments that are no tensors are part of what is compiled.
    """
    compiled = tf.function(fn, jit_compile=True, autograph=False)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _current.get():
            return fn(*args, **kwargs)
        with running_op_by_op(False):
            return compiled(*args, **kwargs)

    return run
