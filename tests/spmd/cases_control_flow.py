"""Cases: loops, conditionals, dynamic slices and functions over sharded tensors (section 3.2: the sharding is
carried by whatever the program is made of; section 3.3.1: all devices run the same program, so that a
collective within a loop or a branch is met by all of them).
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from spmd_case import Case, floats
from tensorflow.compiler.tf2xla.python import xla

from lingvo_moe.core.engine.collectives import parse_collectives
from lingvo_moe.core.sharding.annotate import split

ROWS = ("d", None)


def within(kind: str, name: str) -> Callable[[str], None]:
    """For `Case.inspect`: every collective of the kind is in the named part of the model."""

    def inspect(hlo: str) -> None:
        names = [c.op_name for c in parse_collectives(hlo) if c.kind == kind]
        assert names and all(f"/{name}/" in n for n in names), names

    return inspect


def has(instruction: str) -> Callable[[str], None]:
    """For `Case.inspect`: the compiled program still contains the operation."""

    def inspect(hlo: str) -> None:
        assert f" {instruction}(" in hlo, instruction

    return inspect


def repeat(times: int, body: Callable, *state: tf.Tensor):
    """A tf.while_loop with a known number of iterations, as its gradient requires."""
    start = (tf.constant(0), *state)
    out = tf.while_loop(
        lambda i, *_: i < times,
        lambda i, *s: (i + 1, *body(i, *s)),
        start,
        maximum_iterations=times,
    )
    return out[1:]


def annotated_state(x):
    return repeat(5, lambda i, x: (split(tf.tanh(x) * 1.1 + 0.1, 0, 8),), split(x, 0, 8))


def inferred_state(x):
    return repeat(5, lambda i, x: (tf.tanh(x) * 1.1 + 0.1,), split(x, 0, 8))


def contracting(x, w):
    w = split(w, 0, 8)
    return repeat(3, lambda i, x: (tf.tanh(split(x, 1, 8) @ w),), x)


def uneven_reduction(x):
    return repeat(
        3, lambda i, x: (x - tf.reduce_mean(tf.exp(x), 0, keepdims=True),), split(x, 0, 8)
    )


def runtime_bound(x, n):
    return tf.while_loop(
        lambda i, x: i < n,
        lambda i, x: (i + 1, tf.reduce_sum(x, 0, keepdims=True) * 0.01 + x),
        (tf.constant(0), split(x, 0, 8)),
    )[1]


def reducing_condition(x):
    start = (split(x, 0, 8),)
    return tf.while_loop(
        lambda x: tf.reduce_sum(x * x) > 1, lambda x: (split(x * 0.7, 0, 8),), start
    )


def nested(x, w):
    w = split(w, 0, 8)

    def body(i, x):
        return repeat(2, lambda j, x: (tf.tanh(split(x, 1, 8) @ w),), x)

    return repeat(2, body, x)


def tensor_array(x):
    x = split(x, 0, 8)
    rows, times, columns = x.shape
    out = tf.TensorArray(x.dtype, times, element_shape=[rows, columns])

    def body(i, carry, out):
        carry = tf.tanh(carry + x[:, i])
        return carry, out.write(i, carry)

    carry, out = repeat(times, body, tf.zeros_like(x[:, 0]), out)
    return out.stack(), carry


def scan(dimension):
    return lambda x: tf.scan(lambda carry, e: 0.5 * carry + e, split(x, dimension, 8))


def mapped(dimension, operator):
    return lambda x, w: operator(lambda e: tf.tanh(e @ w), split(x, dimension, 8))


def branch_in_loop(x):
    def body(i, x):
        mean = lambda: x + tf.reduce_mean(x, 0, keepdims=True)  # noqa: E731
        return (tf.cond(i % 2 > 0, mean, lambda: tf.tanh(x)),)

    return repeat(4, body, split(x, 0, 8))


LOOPS = [
    Case(
        "annotated_state",
        annotated_state,
        (floats(16, 4),),
        splits=[ROWS],
        forward={},
        backward={},
        inspect=has("while"),
    ),
    Case(
        "inferred_state",
        inferred_state,
        (floats(16, 4),),
        splits=[ROWS],
        forward={},
        backward={},
        inspect=has("while"),
    ),
    Case(
        "contracting",
        contracting,
        (floats(4, 16), floats(16, 16)),
        splits=[None, ROWS],
        # Backward: the same again, and the gradient's columns for the product with w's rows.
        forward={"all-reduce": 1},
        backward={"all-gather": 1, "all-reduce": 1},
        inspect=within("all-reduce", "while"),
        several_processes=True,
    ),
    Case(
        "uneven_reduction",
        uneven_reduction,
        (floats(15, 4),),
        whole=True,
        forward={"all-reduce": 1},
        backward={"all-reduce": 2},
        inspect=within("all-reduce", "while"),
    ),
    Case(
        "runtime_bound",
        runtime_bound,
        (floats(16, 4), np.array(3, np.int32)),
        splits=[ROWS, None],
        forward={"all-reduce": 1},
        gradients=(),
        inspect=within("all-reduce", "while"),
    ),
    # A sum over all parts decides the number of iterations, so that all devices agree.
    Case(
        "reducing_condition",
        reducing_condition,
        (floats(16, 4),),
        splits=[ROWS],
        forward={"all-reduce": 1},
        gradients=(),
    ),
    Case(
        "nested_loops",
        nested,
        (floats(4, 16), floats(16, 16)),
        splits=[None, ROWS],
        forward={"all-reduce": 1},
        inspect=within("all-reduce", "while/while"),
        backward={"all-gather": 1, "all-reduce": 1},
    ),
    Case(
        "tensor_array",
        tensor_array,
        (floats(16, 4, 3),),
        splits=[("d", None, None)],
        forward={},
        backward={},
    ),
    Case("scan", scan(1), (floats(5, 16),), splits=[(None, "d")], forward={}, backward={}),
    # A loop over the dimension that is sharded: its element is on one device each time. XLA gathers the
    # whole once; a vectorised map is what stays local.
    Case(
        "scan_along_cut",
        scan(0),
        (floats(16, 5),),
        splits=[ROWS],
        forward={"all-gather": 1, "all-reduce": 1},
        backward={},
    ),
    Case(
        "map",
        mapped(1, tf.map_fn),
        (floats(4, 16, 3), floats(3, 5)),
        splits=[(None, "d", None), None],
        forward={},
        backward={"all-reduce": 1},
    ),
    Case(
        "map_along_cut",
        mapped(0, tf.map_fn),
        (floats(8, 6, 3), floats(3, 5)),
        splits=[("d", None, None), None],
        forward={"all-gather": 1},
        backward={"all-gather": 2},
    ),
    Case(
        "vectorized_map_along_cut",
        mapped(0, tf.vectorized_map),
        (floats(8, 6, 3), floats(3, 5)),
        splits=[("d", None, None), None],
        forward={},
        backward={"all-reduce": 1},
    ),
    Case(
        "branch_in_loop",
        branch_in_loop,
        (floats(16, 4),),
        splits=[ROWS],
        forward={"all-reduce": 1},
        backward={"all-reduce": 2},
        inspect=within("all-reduce", "cond"),
    ),
]


def products(x, w, p):
    x = split(x, 0, 8)
    return tf.cond(
        p > 0, lambda: split(tf.tanh(x @ w), 0, 8), lambda: split(x @ tf.transpose(w), 0, 8)
    )


def reductions(x, p):
    x = split(x, 0, 8)
    return tf.cond(p > 0, lambda: tf.reduce_sum(tf.exp(x), 0), lambda: tf.reduce_max(x, 0))


def recut_within(x, p):
    x = split(x, 0, 8)
    return tf.cond(
        p > 0, lambda: split(x * 2, 0, 8), lambda: split(split(tf.tanh(x), 1, 8) * 3, 0, 8)
    )


def reducing_predicate(x):
    x = split(x, 0, 8)
    return tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: tf.reduce_sum(x @ tf.transpose(x), 1),
        lambda: tf.reduce_max(x, 1),
    )


def switch(x, i):
    x = split(x, 0, 8)
    branches = [lambda: tf.reduce_sum(x, 1), lambda: tf.reduce_max(x, 1), lambda: x[:, 0]]
    return tf.switch_case(i, branches)


def _number(n: int) -> np.ndarray:
    return np.array(n, np.int32)


CONDITIONALS = [
    *[
        Case(
            f"branch_{p}_of_products",
            products,
            (floats(16, 8), floats(8, 8), _number(p)),
            splits=[ROWS, None, None],
            forward={},
            backward={"all-reduce": 2},
            inspect=has("conditional"),
        )
        for p in (0, 1)
    ],
    # Both branches are in the program, each with its collective; one of them runs.
    *[
        Case(
            f"branch_{p}_of_reductions",
            reductions,
            (floats(16, 8), _number(p)),
            splits=[ROWS, None],
            forward={"all-reduce": 2},
            backward={"all-reduce": 3},
            inspect=has("conditional"),
            several_processes=p == 1,
        )
        for p in (0, 1)
    ],
    Case(
        "recut_within_a_branch",
        recut_within,
        (floats(16, 8), _number(0)),
        splits=[ROWS, None],
        forward={"all-to-all": 2},
        backward={"all-to-all": 4},
    ),
    Case(
        "reducing_predicate",
        reducing_predicate,
        (floats(16, 8),),
        splits=[ROWS],
        forward={"all-gather": 1, "all-reduce": 1},
        backward={"all-gather": 2, "all-reduce": 2},
    ),
    *[
        Case(
            f"switch_{i}",
            switch,
            (floats(16, 8), _number(i)),
            splits=[ROWS, None],
            forward={},
            backward={},
            inspect=has("conditional"),
        )
        for i in (0, 1, 2)
    ],
]


def slice_columns(x, i):
    return tf.slice(split(x, 0, 8), [0, i], [16, 3])


def slice_rows(x, i):
    return tf.slice(split(x, 0, 8), [i, 0], [5, 4])


def one_row(x, i):
    return split(x, 0, 8)[i]


def update_rows(x, rows, at):
    return split(tf.tensor_scatter_nd_update(split(x, 0, 8), at[:, None], rows), 0, 8)


def update_slice(x, rows, i):
    x = split(x, 0, 8)
    y = xla.dynamic_update_slice(x, rows, tf.stack([i, 0]))
    y.set_shape(x.shape)
    return split(y, 0, 8)


SLICES = [
    Case(
        "slice_along_whole",
        slice_columns,
        (floats(16, 8), _number(2)),
        splits=[ROWS, None],
        forward={},
        backward={},
    ),
    # Differs: where a slice begins is known when the program runs, so a halo cannot be; XLA gathers
    # the tensor.
    *[
        Case(
            f"slice_along_cut_from_{i}",
            slice_rows,
            (floats(16, 4), _number(i)),
            splits=[ROWS, None],
            forward={"all-gather": 1},
            backward={},
        )
        for i in (0, 6, 11)
    ],
    Case(
        "row_along_cut",
        one_row,
        (floats(16, 4), _number(6)),
        splits=[ROWS, None],
        forward={"all-gather": 1},
        backward={},
    ),
    Case(
        "update_rows",
        update_rows,
        (floats(16, 4), floats(3, 4), np.array([1, 7, 15], np.int32)),
        splits=[ROWS, None, None],
        forward={},
        backward={"all-reduce": 1},
        several_processes=True,
    ),
    # Differs: a slice may be written across parts, and XLA gathers what it is written into; the rows
    # given one by one, as above, stay where they are.
    Case(
        "update_slice",
        update_slice,
        (floats(16, 4), floats(3, 4), _number(6)),
        splits=[ROWS, None, None],
        forward={"all-gather": 1},
        gradients=(),
        jit_reference=True,
    ),
]


@tf.function(autograph=False)
def layer(x, w):
    return tf.tanh(x @ w)


def function_twice(x, w):
    return layer(layer(split(x, 0, 8), w), w)


def function_cut_two_ways(x, w):
    return split(layer(split(x, 0, 8), w), 0, 8), split(layer(split(x, 1, 8), w), 1, 8)


FUNCTIONS = [
    Case(
        "function_twice",
        function_twice,
        (floats(16, 8), floats(8, 8)),
        splits=[ROWS, None],
        forward={},
        backward={"all-reduce": 1},
    ),
    # Each call is sharded as its operands are. The second product is contracted along the sharding, and XLA
    # makes its operand whole instead of summing parts of the result and cutting that.
    Case(
        "function_cut_two_ways",
        function_cut_two_ways,
        (floats(16, 8), floats(8, 8)),
        forward={"all-gather": 1},
        backward={"all-gather": 2, "all-reduce": 1, "all-to-all": 1},
    ),
]

CASES = [*LOOPS, *CONDITIONALS, *SLICES, *FUNCTIONS]
