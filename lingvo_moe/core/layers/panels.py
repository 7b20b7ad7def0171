"""Weights in panels of a few columns each: how TensorFlow's own kernels read them fastest (core/op_by_op.py).

A step of a search multiplies a few rows by every weight of the model, so what it costs is to read them. A
product with a plain matrix of many columns first copies pieces of it into a buffer; with panels that lie
in memory one after another nothing is copied. With many rows both are equally fast.

In each row of a product the sums have an order of their own, whatever rows are multiplied with it, as long
as there are two or more: a single row is a product of another kind. Callers see to it that there are two. Two or
three take longer than four, which keep the processor's multipliers busy: the search has no fewer than four.

Inside `arranging("int8")` weights become `EightBit`s (eight_bit.py), which take the place of panels.

Letters: R row, M and N the dimensions of a weight, P panel, W column of a panel.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import tensorflow as tf

from lingvo_moe.core.layers.eight_bit import EightBit

_WIDTH = 64
FEWEST_ROWS = 4  # fewer take longer; one is rounded otherwise
WEIGHTS = ("float32", "int8")

_weights: contextvars.ContextVar[str] = contextvars.ContextVar("weights", default="float32")


@contextlib.contextmanager
def arranging(weights: str) -> Iterator[None]:
    """What the weights are, of WEIGHTS, that are arranged inside: see BaseLayer.ForInference."""
    token = _weights.set(weights)
    try:
        yield
    finally:
        _weights.reset(token)


def in_panels(w_MN: tf.Tensor, width: int = _WIDTH) -> tf.Tensor | EightBit:
    """[M,N] as panels [P,M,W], the last one filled up with zeros. N need not be known."""
    if _weights.get() == "int8":
        return EightBit.Of(w_MN, width)
    rows, columns = w_MN.shape
    columns = tf.shape(w_MN)[1] if columns is None else columns
    panels = -(-columns // width)
    w_MN = tf.pad(w_MN, [[0, 0], [0, panels * width - columns]])
    return tf.transpose(tf.reshape(w_MN, [rows, panels, width]), [1, 0, 2])


def as_panels(w_PMW: tf.Tensor) -> tf.Tensor | EightBit:
    """Panels [P,M,W], each of them a head's weights for instance, as `panel_product` takes them."""
    if _weights.get() == "int8":
        panels, rows, width = w_PMW.shape
        w_MPW = tf.transpose(w_PMW, [1, 0, 2])
        return EightBit.Of(tf.reshape(w_MPW, [rows, panels * width]), width)
    return w_PMW


def panel_product(x_RM: tf.Tensor, w_PMW: tf.Tensor | EightBit) -> tf.Tensor:
    """[R,M] by panels: [P,R,W]."""
    if isinstance(w_PMW, EightBit):
        panels, _, width = w_PMW.shape
        y_RPW = tf.reshape(w_PMW.Product(x_RM), [-1, panels, width])
        return tf.transpose(y_RPW, [1, 0, 2])
    return tf.matmul(tf.expand_dims(x_RM, 0), w_PMW)


def product(x_RM: tf.Tensor, w_PMW: tf.Tensor | EightBit, columns: int | None) -> tf.Tensor:
    """[R,M] by the matrix of that many columns which the panels hold: [R,N]. None: with all that fill them up."""
    if isinstance(w_PMW, EightBit):
        return w_PMW.Product(x_RM)
    panels, _, width = w_PMW.shape
    panels = tf.shape(w_PMW)[0] if panels is None else panels
    y_RPW = tf.transpose(panel_product(x_RM, w_PMW), [1, 0, 2])
    y_RN = tf.reshape(y_RPW, [-1, panels * width])
    return y_RN if columns in (None, panels * width) else y_RN[:, :columns]
