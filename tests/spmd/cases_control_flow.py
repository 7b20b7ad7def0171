"""Cases: loops, conditionals, dynamic slices and functions over sharded tensors (section 3.2: the sharding is
carried by whatever the program is made of; section 3.3.1: all devices run the same program, so that a
collective within a loop or a branch is met by all of them).
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from spmd_case import Case, floats

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.sharding.annotate import split

ROWS = ("d", None)


def within(kind: str, name: str) -> Callable[[str], None]:
    """Checks, as a `Case.inspect`, that every collective of the kind is in the named part of the model."""

    def inspect(hlo: str) -> None:
        names = [c.op_name for c in parse_collectives(hlo) if c.kind == kind]
        assert names and all(f"/{name}/" in n for n in names), names

    return inspect


def has(instruction: str) -> Callable[[str], None]:
    """Checks, as a `Case.inspect`, that the compiled program still contains the operation."""

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


def contracting(x, w):
    w = split(w, 0, 8)
    return repeat(3, lambda i, x: (tf.tanh(split(x, 1, 8) @ w),), x)


def nested(x, w):
    w = split(w, 0, 8)

    def body(i, x):
        return repeat(2, lambda j, x: (tf.tanh(split(x, 1, 8) @ w),), x)

    return repeat(2, body, x)


def mapped(operator):
    return lambda x, w: operator(lambda e: tf.tanh(e @ w), split(x, 0, 8))


LOOPS = [
    Case("annotated_state", annotated_state, (floats(16, 4),), splits=[ROWS], forward={}, backward={},
        inspect=has("while")),
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
    Case("nested_loops", nested, (floats(4, 16), floats(16, 16)), splits=[None, ROWS], forward={"all-reduce": 1},
        inspect=within("all-reduce", "while/while"), backward={"all-gather": 1, "all-reduce": 1}),
    Case("map_along_cut", mapped(tf.map_fn), (floats(8, 6, 3), floats(3, 5)), splits=[("d", None, None), None],
        forward={"all-gather": 1}, backward={"all-gather": 2}),
    Case("vectorized_map_along_cut", mapped(tf.vectorized_map), (floats(8, 6, 3), floats(3, 5)),
        splits=[("d", None, None), None], forward={}, backward={"all-reduce": 1}),
]  # fmt: skip


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


def _number(n: int) -> np.ndarray:
    return np.array(n, np.int32)


CONDITIONALS = [
    Case("branch_0_of_products", products, (floats(16, 8), floats(8, 8), _number(0)), splits=[ROWS, None, None],
        forward={}, backward={"all-reduce": 2}, inspect=has("conditional")),
    # Both branches are in the program, each with its collective; one of them runs.
    Case("branch_1_of_reductions", reductions, (floats(16, 8), _number(1)), splits=[ROWS, None],
        forward={"all-reduce": 2}, backward={"all-reduce": 3}, inspect=has("conditional"), several_processes=True),
    Case("recut_within_a_branch", recut_within, (floats(16, 8), _number(0)), splits=[ROWS, None],
        forward={"all-to-all": 2}, backward={"all-to-all": 4}),
]  # fmt: skip


def slice_columns(x, i):
    return tf.slice(split(x, 0, 8), [0, i], [16, 3])


def update_rows(x, rows, at):
    return split(tf.tensor_scatter_nd_update(split(x, 0, 8), at[:, None], rows), 0, 8)


SLICES = [
    Case("slice_along_whole", slice_columns, (floats(16, 8), _number(2)), splits=[ROWS, None], forward={}, backward={}),
    Case("update_rows", update_rows, (floats(16, 4), floats(3, 4), np.array([1, 7, 15], np.int32)),
        splits=[ROWS, None, None], forward={}, backward={"all-reduce": 1}, several_processes=True),
]  # fmt: skip


@tf.function(autograph=False)
def layer(x, w):
    return tf.tanh(x @ w)


def function_cut_two_ways(x, w):
    return split(layer(split(x, 0, 8), w), 0, 8), split(layer(split(x, 1, 8), w), 1, 8)


FUNCTIONS = [
    # Each call is sharded as its operands are. The second product is contracted along the sharding, and XLA
    # makes its operand whole instead of summing parts of the result and cutting that.
    Case("function_cut_two_ways", function_cut_two_ways, (floats(16, 8), floats(8, 8)), forward={"all-gather": 1},
        backward={"all-gather": 2, "all-reduce": 1, "all-to-all": 1}),
]  # fmt: skip

CASES = [*LOOPS, *CONDITIONALS, *SLICES, *FUNCTIONS]
