"""Cases: convolutions over sharded dimensions (section 3.3.3, "Halo exchange"; appendix A.4).

What is promised: parts exchange the edges that their windows share, the halos, by collective-permute;
no device ever has the image. A kernel's gradient is a sum over parts: an all-reduce.

XLA keeps the promise where the result of a convolution is annotated as its input is, and almost all
cases here annotate both. What it does otherwise is said where it is asserted. Kernel gradients that
are WRONG, and gradients that do not compile at all, are at the end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from spmd_case import Case, devices_of, floats

from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.annotate import mesh_split, split

Cut = Callable[[tf.Tensor], tf.Tensor]
Counts = dict[str, int]


def rows(parts: int = 8) -> Cut:
    """Shards the first spatial dimension."""
    return lambda x: split(x, 1, parts)


def over(mesh: str, *mapping: str | None) -> Cut:
    """Shards as `mesh_split` does, by a mapping of all dimensions."""
    return lambda x: mesh_split(x, Mesh.parse(mesh), mapping)


def uncut(x: tf.Tensor) -> tf.Tensor:
    """Leaves the result's sharding to the partitioner."""
    return x


def conv(
    cut: Cut,
    stride: int = 1,
    padding: Any = "SAME",
    dilation: int = 1,
    kernel: Cut = uncut,
    result: Cut | None = None,
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """A convolution of (input, kernel) by their rank; the result is sharded as the input unless said."""

    def fn(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        x, w = cut(x), kernel(w)
        if x.shape.rank == 3:
            y = tf.nn.conv1d(x, w, stride, padding, dilations=dilation)
        elif x.shape.rank == 4:
            y = tf.nn.conv2d(x, w, stride, padding, dilations=dilation)
        else:
            y = tf.nn.conv3d(x, w, [1, stride, stride, stride, 1], padding)
        return (result or cut)(y)

    return fn


def depthwise(cut: Cut, kernel: Cut = uncut) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """A convolution of each channel by itself."""
    return lambda x, w: cut(tf.nn.depthwise_conv2d(cut(x), kernel(w), [1, 1, 1, 1], "SAME"))


def case(
    name: str,
    shape: Sequence[int],
    kernel: Sequence[int],
    fn: Callable,
    forward: Counts,
    gradient: Counts,
    **rest: Any,
) -> Case:
    """A case with an input and a kernel; the input arrives sharded by rows if they divide."""
    devices = Mesh.parse(rest.get("mesh", "d:8"))
    first = len(devices.shape) == 1 and shape[1] % devices.size == 0
    splits = [(None, "d", *[None] * (len(shape) - 2)), None] if first else None
    return Case(
        name,
        fn,
        (floats(*shape), floats(*kernel)),
        **{"splits": splits, "forward": forward, "backward": gradient, "whole": True, **rest},
    )


def halo(permutes: int) -> dict[str, Counts]:
    """The collectives of a convolution with halos.

    Forward, so many collective-permutes; backward, those for the input and for the gradient of the result, and an
    all-reduce of the gradient of the kernel.
    """
    if not permutes:
        return {"forward": {}, "gradient": {"all-reduce": 1}}
    return {
        "forward": {"collective-permute": permutes},
        "gradient": {"collective-permute": 2 * permutes, "all-reduce": 1},
    }


def neighbours(*distances: int) -> Callable[[str], None]:
    """Checks, as a `Case.inspect`, that each collective-permute shifts all parts by one of these distances."""

    def inspect(hlo: str) -> None:
        pairs = devices_of(hlo, "collective-permute")
        moved = [{target - source for source, target in p} for p in pairs]
        assert sorted(moved, key=str) == sorted(({d} for d in distances), key=str), moved

    return inspect


# Kernels of 1 to 7 over parts of 2: up to 5 a halo is from the neighbour, then from the one behind it too.
KERNELS = [
    case(
        f"kernel_{k}",
        (2, 16, 3),
        (k, 3, 2),
        conv(rows()),
        **halo(len(distances)),
        inspect=neighbours(*distances),
        several_processes=k == 7,
    )
    for k, distances in enumerate(
        [(), (-1,), (1, -1), (1, -1), (1, -1), (1, -1, -2), (1, 2, -1, -2)], 1
    )
]

STRIDES = [
    case(
        f"stride_{stride}_kernel_{k}_{padding.lower()}",
        (2, 48, 2),
        (k, 2, 3),
        conv(rows(4), stride, padding),
        mesh="d:4",
        **halo(n),
    )
    for stride, k, padding, n in [(2, 2, "SAME", 0), (2, 3, "SAME", 1), (3, 4, "VALID", 1)]
]

# Three rows of padding before 16: 17 results over 8 parts are 3 a part, and lie across the 2 of the input.
PADDINGS = [
    case("explicit_padding", (2, 16, 4, 2), (3, 3, 2, 3), conv(rows(), padding=[[0, 0], [3, 0], [0, 1], [0, 0]]),
        {"collective-permute": 4}, {"collective-permute": 7, "all-reduce": 1}),
    case("explicit_padding_stride_2", (2, 16, 4, 2), (3, 3, 2, 3), conv(rows(4), 2, [[0, 0], [0, 4], [1, 0], [0, 0]]),
        mesh="d:4", **halo(2)),
]  # fmt: skip

# Figure 11: right halos of (1, 2, 3, 4) rows, partition_id + 1. A partition that makes n results with
# stride s and window k from c rows of its own, behind low padding p, needs
#     partition_id * (n s - c) + (n - 1) s - p + k - c
# rows from its right. With four partitions of n = 2 results (the figure's red cells), s = 2 and c = 3
# (12 rows in all) that is partition_id + k - p - 1, so k = 3 and p = 1: the left halo of partition 1 is
# empty, and its two windows end 2 rows into partition 2, as the figure has it. High padding 4 makes
# every one of the eight results; with high padding 1 the last partition has none to make.
FIGURE_11 = [
    case(
        name,
        (2, 12, 1, 2),
        (3, 1, 2, 3),
        conv(rows(4), 2, [[0, 0], [1, high], [0, 0], [0, 0]]),
        mesh="d:4",
        inspect=neighbours(-1),
        **halo(1),
    )
    for name, high in [("figure_11", 4), ("figure_11_uneven", 1)]
]

UNEVEN = [
    case(
        f"uneven_{size}_over_{parts}_stride_{stride}",
        (2, size, 2),
        (3, 2, 3),
        conv(rows(parts), stride),
        {"collective-permute": n},
        {"collective-permute": m, "all-reduce": 1},
        mesh=f"d:{parts}",
        several_processes=(size, parts, stride) == (19, 8, 2),
    )
    for size, parts, stride, n, m in [(15, 8, 1, 2, 4), (19, 8, 2, 3, 5)]
]

# TensorFlow itself has no gradient of these on a CPU.
WINDOW_DILATION = [
    case(
        f"window_dilation_{dilation}_{padding.lower()}_{size}",
        (2, size, 2),
        (3, 2, 3),
        conv(rows(4), 1, padding, dilation),
        mesh="d:4",
        jit_reference=True,
        **halo(n),
    )
    for size, dilation, padding, n in [(16, 2, "VALID", 2), (15, 2, "SAME", 2)]
]

YX = "y:2,x:4"
DIMENSIONS = [
    case("columns", (2, 4, 16, 2), (3, 3, 2, 3), conv(lambda x: split(x, 2, 8)), **halo(2)),
    case("rows_and_columns", (2, 8, 8, 2), (3, 3, 2, 3), conv(over(YX, None, "y", "x", None)), mesh=YX, **halo(4)),
    case("batch", (8, 6, 6, 2), (3, 3, 2, 3), conv(lambda x: split(x, 0, 8)), **halo(0)),
    case("batch_and_rows", (4, 8, 6, 2), (3, 3, 2, 3), conv(over(YX, "y", "x", None, None)), {"collective-permute": 2},
        {"collective-permute": 4, "all-reduce": 2}, mesh=YX),
    # Both axes of the mesh are in use: without "y" this would be the first of WRONG_KERNEL_GRADIENT.
    case(
        "rows_and_output_feature",
        (2, 16, 4, 2),
        (3, 3, 2, 4),
        conv(
            over(YX, None, "x", None, None),
            kernel=over(YX, None, None, None, "y"),
            result=over(YX, None, "x", None, "y"),
        ),
        {"collective-permute": 2},
        {"collective-permute": 4, "all-reduce": 2},
        mesh=YX,
    ),
    case("conv3d", (1, 16, 3, 3, 2), (3, 3, 3, 2, 2), conv(rows()), **halo(2)),
]  # fmt: skip


def last(x: tf.Tensor) -> tf.Tensor:
    """Shards the last dimension."""
    return split(x, x.shape.rank - 1, 8)


FEATURES = [
    # The input's features are contracted: parts of every sum; then the result's, whose gradient is.
    case("input_feature", (2, 6, 6, 8), (3, 3, 8, 3), conv(last, kernel=lambda w: split(w, 2, 8), result=uncut),
        {"all-reduce": 1}, {}),
    case("output_feature", (2, 6, 6, 3), (3, 3, 3, 8), conv(uncut, kernel=last, result=last), **halo(0)),
    case("depthwise_features", (2, 4, 4, 8), (3, 3, 8, 1), depthwise(last, lambda w: split(w, 2, 8)), {}, {}),
    case(
        "depthwise",
        (2, 16, 4, 3),
        (3, 3, 3, 2),
        depthwise(rows()),
        {"collective-permute": 2},
        # Differs: for the input's gradient XLA gathers the result's, to convolve in groups.
        {"collective-permute": 2, "all-gather": 1, "all-reduce": 1},
    ),
    # Differs: convolutions of several features a group are gathered forward too.
    case("grouped", (2, 16, 4, 4), (3, 3, 2, 6), conv(rows()), {"all-gather": 1},
        {"collective-permute": 2, "all-gather": 1, "all-reduce": 1}, jit_reference=True),
    # A kernel sharded along space is made whole, not the image.
    case(
        "kernel_cut_too",
        (2, 16, 2),
        (4, 2, 3),
        conv(rows(4), kernel=lambda w: split(w, 0, 4)),
        {"collective-permute": 2, "all-gather": 1},
        {"collective-permute": 4, "all-gather": 1, "all-reduce": 1},
        mesh="d:4",
    ),
]  # fmt: skip

# "GShard will then propagate the sharding": differs. With the input alone annotated, XLA carries the sharding
# through a SAME convolution of stride 1; before any other (or one along a dimension beside which the
# other spatial ones are of size 1) it gathers the image. It also gathers it for the kernel's gradient,
# since the gradient that comes from behind is not sharded.
INPUT_ONLY = [
    case("input_only_same", (2, 16, 4, 2), (3, 3, 2, 3), conv(rows(), result=uncut), {"collective-permute": 2},
        {"collective-permute": 2, "all-gather": 1}, whole=False),
    case("input_only_conv1d", (2, 16, 2), (3, 2, 3), conv(rows(), result=uncut), {"all-gather": 1},
        {"collective-permute": 2, "all-gather": 1}, whole=False),
    *[
        case(
            f"input_only_{name}",
            (2, 32, 4, 2),
            (3, 3, 2, 3),
            conv(rows(), stride, padding, result=uncut),
            {"all-gather": 1},
            {"collective-permute": 1, "all-gather": 1},
            whole=False,
        )
        for name, stride, padding in [("stride_2", 2, "SAME"), ("valid", 1, "VALID")]
    ],
]  # fmt: skip

CASES = [
    *KERNELS,
    *STRIDES,
    *PADDINGS,
    *FIGURE_11,
    *UNEVEN,
    *WINDOW_DILATION,
    *DIMENSIONS,
    *FEATURES,
    *INPUT_ONLY,
]


def _fault(name: str, shape, kernel, fn, mesh: str) -> Case:
    return Case(name, fn, (floats(*shape), floats(*kernel)), mesh=mesh, whole=True)


# XLA's partitioner adds up the parts of a kernel's gradient over all devices. Where a mesh axis is idle,
# so that each part of the image is held more than once, the sum is too large by the number of copies.
# Right, and the way round it: shard anything else along that axis, the batch ("batch_and_rows") or the
# kernel's output features ("rows_and_output_feature"); the input's features, last, are not enough. It is
# the partitioner's doing: the same convolution written in JAX has the same fault, as has `_PADDED`.
_IDLE = [
    _fault("idle_axis", (2, 16, 4, 2), (3, 3, 2, 4), conv(over(YX, None, "x", None, None)), YX),
    _fault("fewer_parts_than_devices", (2, 16, 2), (3, 2, 3), conv(rows(4)), "d:8"),
    _fault(
        "idle_axis_of_the_result",
        (4, 16, 4, 2),
        (3, 3, 2, 4),
        conv(
            over(YX, None, "x", None, "y"),
            kernel=over(YX, None, None, "y", None),
            result=over(YX, None, "x", None, None),
        ),
        YX,
    ),
]

# Explicit padding after which the last window lies in padding alone, and which makes one result more
# than parts: the first window of the next part starts past its own shard. SAME and VALID have no such windows.
_PADDED = _fault(
    "stride_3_last_window_padded",
    (1, 12, 1, 1),
    (1, 1, 1, 1),
    conv(rows(4), 3, [[0, 0], [0, 1], [0, 0], [0, 0]]),
    "d:4",
)

WRONG_KERNEL_GRADIENT = [*_IDLE, _PADDED]

# The gradient of the input: XLA slices more than there is and its own verifier refuses the program.
NOT_COMPILED = _fault(
    "stride_2_kernel_4_valid_10", (1, 10, 1, 1), (4, 1, 1, 1), conv(rows(4), 2, "VALID"), "d:4"
)

# A negative low padding of a dilated base, which is what padding deeper than the kernel reaches becomes
# in the gradient of a strided convolution: XLA does not only refuse it, it ends the process.
ABORTED = _fault(
    "stride_2_padded_beyond_kernel",
    (1, 16, 1, 1),
    (2, 1, 1, 1),
    conv(rows(4), 2, [[0, 0], [2, 0], [0, 0], [0, 0]]),
    "d:4",
)
