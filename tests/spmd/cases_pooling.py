"""Cases: pooling over sharded dimensions (appendix A.4: reduce-window, and select-and-scatter backward).

The gradient of max pooling is WRONG where windows overlap by their stride or more (window >= 2 *
stride) along a sharded dimension: see `WRONG`, and `max_of_shifts`, which is right.
"""

from collections.abc import Callable

import tensorflow as tf
from cases_halo import Cut, over, rows, uncut
from spmd_case import Case, floats

YX = "y:2,x:4"


def pool(
    kind: str, size: int, stride: int, padding: str, cut: Cut, result: Cut | None = None
) -> Callable[[tf.Tensor], tf.Tensor]:
    """tf.nn's max or average pooling of [N, H, W, C]; the result is sharded as the input unless given."""
    op = {"max": tf.nn.max_pool2d, "avg": tf.nn.avg_pool2d}[kind]
    return lambda x: (result or cut)(op(cut(x), size, stride, padding))


def max_of_shifts(size: int, cut: Cut) -> Callable[[tf.Tensor], tf.Tensor]:
    """Max pooling of stride 1 and VALID padding along rows, spelled out: what is right when sharded."""

    def fn(x: tf.Tensor) -> tf.Tensor:
        x = cut(x)
        count = x.shape[1] - size + 1
        y = x[:, :count]
        for shift in range(1, size):
            y = tf.maximum(y, cut(x[:, shift : shift + count]))
        return cut(y)

    return fn


def _case(kind, size, stride, padding, forward, gradient, shape=(2, 24, 4, 2)) -> Case:
    return Case(
        f"{kind}_window_{size}_stride_{stride}_{padding.lower()}_{shape[1]}",
        pool(kind, size, stride, padding, rows(4)),
        (floats(*shape),),
        mesh="d:4",
        forward={"collective-permute": forward} if forward else {},
        backward={"collective-permute": gradient} if gradient else {},
        whole=True,
    )


CASES = [
    *[
        _case(*parameters)
        for parameters in [
            ("max", 3, 2, "SAME", 1, 3),
            ("max", 5, 3, "SAME", 2, 4),
            ("avg", 3, 2, "VALID", 1, 4),
            ("avg", 3, 2, "SAME", 4, 6, (2, 15, 4, 2)),
        ]
    ],
    Case("max_rows_and_columns", pool("max", 3, 2, "SAME", over(YX, None, "y", "x", None)), (floats(2, 8, 16, 2),),
        mesh=YX, forward={"collective-permute": 2}, backward={"collective-permute": 6}),
    # Unlike convolutions (`cases_halo.INPUT_ONLY`), pooling propagates the input's sharding by itself.
    Case("max_input_only", pool("max", 3, 2, "SAME", rows(8), uncut), (floats(2, 32, 4, 2),),
        forward={"collective-permute": 1}, backward={"collective-permute": 3}, several_processes=True),
    Case("max_of_shifts", max_of_shifts(3, rows(4)), (floats(2, 24, 4, 2),), mesh="d:4",
        forward={"collective-permute": 2}, backward={"collective-permute": 4}, whole=True),
]  # fmt: skip

# XLA's partitioner gives the first part of the result from one row off: it has a halo in front of that
# part as of any other, and slices the result as if it had none. Eight rows over two devices are enough.
# With windows shorter than twice the stride it is right.
WRONG = [
    Case(
        f"max_window_{size}_stride_{stride}_{padding.lower()}",
        pool("max", [size, 1], [stride, 1], padding, rows(2)),
        (floats(1, 8, 1, 1),),
        mesh="d:2",
        whole=True,
    )
    for size, stride, padding in [(2, 1, "VALID"), (4, 2, "VALID")]
]
