"""Helpers for functions of tensors: sizes of dimensions, custom gradients whose operations have names, and marks on
activations that a loop over layers keeps for its backward pass, instead of computing them again.

Layers mark activations with `keep(x, name)`, and a loop (layers/scan.py) says which names it keeps. In its forward
pass the loop collects the marked activations; in its backward pass, where it computes a layer again, their stored
values take the place of the computed ones. Nothing then needs the computed ones, so XLA removes what only led to them.
Outside of such a loop a mark does nothing. A layer declares its names in `KEEPS` (core/base_layer.py).
"""

import contextlib
import contextvars
import enum
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.private.tensorflow import gen_xla_ops


def shape_of(x: tf.Tensor) -> list[int | tf.Tensor]:
    """The sizes of all dimensions of x, whose rank is known: ints, or int32 scalars where a served program leaves them
    open."""
    if x.shape.is_fully_defined():
        return x.shape.as_list()
    sizes = tf.unstack(tf.shape(x))  # one operation, where indexing is four for each
    return [sizes[i] if size is None else size for i, size in enumerate(x.shape)]


def open_shape(x: tf.Tensor) -> list[int | tf.Tensor]:
    """`shape_of` as tf.reshape takes it: -1 where one size alone is unknown, which then costs no operation."""
    sizes = x.shape.as_list()
    return [-1 if n is None else n for n in sizes] if sizes.count(None) <= 1 else shape_of(x)


def dim(x: tf.Tensor, axis: int) -> int | tf.Tensor:
    """The size of one dimension: an int, or an int32 scalar where a served program leaves it open."""
    size = x.shape[axis]
    return tf.unstack(tf.shape(x))[axis] if size is None else size


# Operations whose result is their first argument, or a view of it.
VIEWS = frozenset(
    (
        "ExpandDims",
        "Identity",
        "PreventGradient",
        "Reshape",
        "Squeeze",
        "StopGradient",
        "XlaSharding",
    )
)


def origin(value: tf.Tensor, through: Collection[str] = VIEWS) -> tf.Tensor:
    """The tensor of a graph that a value comes from through operations of some types alone."""
    while value.op.type in through:
        value = value.op.inputs[0]
    return value


def runtime_zeros(
    like: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape | None = None
) -> tf.Tensor:
    """Zeros that tracing cannot fold into a constant of that size.

    Args:
        like: any floating-point tensor, not empty, that is not a constant.
        shape: of the zeros; None: that of `like`.
    """
    first = tf.reshape(like, [-1])[0]
    never = tf.logical_and(tf.math.is_nan(first), tf.math.is_inf(first))
    return tf.fill(tf.shape(like) if shape is None else shape, tf.cast(never, dtype))


def or_zeros(gradient: tf.Tensor | None, x: tf.Tensor) -> tf.Tensor:
    """The gradient of x as a dense tensor, zeros where it is None."""
    return runtime_zeros(x, x.dtype) if gradient is None else tf.convert_to_tensor(gradient)


def in_xla() -> bool:
    """Whether the graph that is being traced goes to XLA, which wants static shapes."""
    if tf.executing_eagerly():
        return False
    return private.in_xla(tf.compat.v1.get_default_graph())


def with_row(rows: tf.Tensor, i: tf.Tensor, row: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """`rows` whose row i along `axis`, an int32 scalar in its range, is `row`, which lacks that dimension.

    It has no gradient in XLA, whose operation it is there.
    """
    if not in_xla():
        here = tf.range(rows.shape[axis]) == i
        here = tf.reshape(here, [-1] + [1] * (rows.shape.rank - axis - 1))
        return tf.where(here, tf.expand_dims(row, axis), rows)
    place = tf.pad(tf.reshape(i, [1]), [[axis, rows.shape.rank - axis - 1]])
    return gen_xla_ops.xla_dynamic_update_slice(rows, tf.expand_dims(row, axis), place)


def sum_type(dtype: tf.DType) -> tf.DType:
    """The type in which terms of a floating-point type are added up: float32, or a wider one."""
    return dtype if dtype.size > 4 else tf.float32


def term_if(condition: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """x in the type of sums where a bool scalar is true, else zeros."""
    x = tf.cast(x, sum_type(x.dtype))
    return tf.where(condition, x, tf.zeros([], x.dtype))


def with_gradient_if(condition: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """x, whose gradient is zero unless a bool scalar is true, even where it would be NaN."""

    @custom_gradient
    def run(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        return tf.identity(x), lambda dx: tf.where(condition, dx, tf.zeros([], dx.dtype))

    return run(x)


def custom_gradient(fn: Callable[..., tuple[Any, Callable]]) -> Callable[..., Any]:
    """`tf.custom_gradient`, its gradient in the scope gradient_tape/<that of the call>.

    Without such a name, plans would attribute the gradient's work to another part of the model.
    """

    @functools.wraps(fn)
    def named(*args: Any) -> tuple[Any, Callable]:
        scope = tf.get_current_name_scope()
        results, grad = fn(*args)

        def named_grad(*upstream: Any) -> Any:
            with tf.name_scope(f"gradient_tape/{scope}/"):
                return grad(*upstream)

        return results, named_grad

    return private.custom_gradient(named)


@custom_gradient
def lookup(table: tf.Tensor, ids: tf.Tensor) -> tuple:
    """The rows of a table [V,M] by int32 ids. The gradient is one dense float32 sum, which XLA shards, in place of
    tf.gather's IndexedSlices."""
    num_ids, width = table.shape

    def grad(dy: tf.Tensor) -> tuple:
        rows = tf.reshape(tf.cast(dy, tf.float32), [-1, width])
        total = tf.math.unsorted_segment_sum(rows, tf.reshape(ids, [-1]), num_ids)
        return tf.cast(total, table.dtype), None

    return tf.gather(table, ids), grad


def fused(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that XLA compiles by itself: for chains of elementwise operations and reductions.

    It must depend on its arguments alone. Arguments that are not tensors are part of what is compiled.
    """
    return tf.function(fn, jit_compile=True, autograph=False)


# --- activations that a loop keeps


class Kept(enum.Flag):
    """The kind of an activation that a loop can keep, as its layer declares it."""

    OTHER = 0
    PRODUCT = enum.auto()  # what a product with weights gives
    OUTPUT = enum.auto()  # what a layer gives
    MOVED = enum.auto()  # what an all-to-all brought


# (tensor, letters of dimensions before its own) -> the tensor, annotated
Annotate = Callable[..., tf.Tensor]


@dataclass
class Collected:
    """The marked activations of one repetition, in the order of the marks: their names, and the functions that
    annotate them."""

    names: list[str] = field(default_factory=list)
    values: list[tf.Tensor] = field(default_factory=list)
    annotate: list[Annotate] = field(default_factory=list)


@dataclass(frozen=True)
class _LoopMarks:
    """The task of marks inside a loop: to collect values, or to take the next of the stored ones."""

    names: Collection[str]
    collected: Collected | None = None
    stored: Iterator[tf.Tensor] | None = None


_NOTHING = _LoopMarks(())
_loop: contextvars.ContextVar[_LoopMarks] = contextvars.ContextVar("kept", default=_NOTHING)


def keeps(name: str) -> bool:
    """Whether the loop that is being traced keeps the activations of that name."""
    return name in _loop.get().names


def keep(x: tf.Tensor, name: str, annotate: Annotate) -> tf.Tensor:
    """Marks an activation.

    Args:
        x: any floating-point tensor of a static shape.
        name: by which a loop asks for it.
        annotate: (tensor, letters) -> annotates a tensor of x's shape, or with further dimensions in front of these,
            whose letters are given.

    Returns:
        x itself; or, where a loop computes a repetition again, the stored value, whose gradient is that of x.
    """
    if not keeps(name):
        return x
    loop = _loop.get()
    if loop.collected is not None:
        loop.collected.names.append(name)
        loop.collected.values.append(x)
        loop.collected.annotate.append(annotate)
        return x
    assert loop.stored is not None
    return _instead(x, next(loop.stored))


@contextlib.contextmanager
def collecting(names: Collection[str]) -> Iterator[Collected]:
    """Inside, marks with these names collect their activations."""
    collected = Collected()
    with _inside(_LoopMarks(names, collected=collected)):
        yield collected


@contextlib.contextmanager
def replacing(names: Collection[str], stored: Sequence[tf.Tensor]) -> Iterator[None]:
    """Inside, marks with these names give the stored values, in the order in which they were collected."""
    with _inside(_LoopMarks(names, stored=iter(stored))):
        yield


@contextlib.contextmanager
def _inside(loop: _LoopMarks) -> Iterator[None]:
    token = _loop.set(loop)
    try:
        yield
    finally:
        _loop.reset(token)


def _instead(x: tf.Tensor, stored: tf.Tensor) -> tf.Tensor:
    """The stored value, with x's gradient."""

    @custom_gradient
    def run(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        return tf.identity(stored), lambda dy: dy

    return run(x)
