"""Cases: manual regions (section 3.2) and the program around them.

Letters: G group, E expert, C capacity slot, S token, M model.
"""

import tensorflow as tf
from spmd_case import Case, floats, ints

from lingvo_moe.core.sharding.annotate import mesh_split, replicate, split
from lingvo_moe.core.sharding.manual import (
    all_reduce,
    auto_to_manual,
    device_index,
    manual_region,
    manual_to_auto,
    rotate,
)
from lingvo_moe.core.sharding.mesh import Mesh

ROWS = ("d", None)
GRID = Mesh.parse("a:2,b:4")
ON_A, WHOLE = ("a", None), (None, None)


def _local_gather(x_GSM, s_EGC):
    """The paper's pseudo code: rows of each group, by indices that stay within the group."""
    x_GSM = split(x_GSM, 0, 8)
    s_EGC = split(s_EGC, 1, 8)
    local_x = auto_to_manual(x_GSM, ("d", None, None))
    local_s = auto_to_manual(s_EGC, (None, "d", None))
    experts, groups, slots = local_s.shape
    g = tf.broadcast_to(tf.range(groups)[tf.newaxis, :, tf.newaxis], [experts, groups, slots])
    data = tf.gather_nd(local_x, tf.stack([g, local_s], -1))
    return manual_to_auto(
        data, (None, "d", None, None), [experts, 8 * groups, slots, data.shape[-1]]
    )


def _global_gather(x_GSM, s_EGC):
    return tf.transpose(
        tf.gather(x_GSM, tf.transpose(s_EGC, [1, 0, 2]), batch_dims=1), [1, 0, 2, 3]
    )


def _grid(fn, ins, outs, axis=None):
    return lambda *args: manual_region(fn, ins, outs, GRID, axis)(*args)


def _relu(x, w):
    return tf.nn.relu(x @ w) + 1.0


def _two_matrices(x, w):
    return tf.nn.relu(x @ w) + 1.0, x @ (w + 1.0)


def _relu_alone(x):
    return tf.nn.relu(x) * x


TURNED = Mesh(("e",), (8,), (7, 6, 5, 4, 3, 2, 1, 0))


def _numbered_and_rotated(x):
    return rotate(x, "e") + tf.cast(device_index("e"), x.dtype)


def _normalised(x):
    """Normalises by sums over all rows, which are on several devices."""
    total = all_reduce(tf.reduce_sum(x * x, 0, keepdims=True), "a")
    return x / (1.0 + total)


def _between_automatic_parts(x, w):
    x = split(tf.nn.relu(x), 0, 8)
    y = manual_region(lambda x: tf.cumsum(x, 1) + tf.reduce_sum(x, 1, keepdims=True), [ROWS], ROWS)(
        x
    )
    # The sums' zero is one constant for the region and for these two.
    return replicate(y @ w), tf.reduce_sum(y), tf.reduce_max(y, 1)


def _cumsum_reference(x, w):
    x = tf.nn.relu(x)
    y = tf.cumsum(x, 1) + tf.reduce_sum(x, 1, keepdims=True)
    return y @ w, tf.reduce_sum(y), tf.reduce_max(y, 1)


def _three_times(x, step):
    loop = lambda i, x: (i + 1, step(x, i))  # noqa: E731
    start = (tf.constant(0), x)
    return tf.while_loop(lambda i, _: i < 3, loop, start, maximum_iterations=3)[1]


def _step(x, i):
    return x * x + tf.cast(i, x.dtype)


def _loop_reference(x):
    for i in range(3):
        x = x * x + float(i)
    return x


def _branch(x):
    def body(x):
        return tf.cond(device_index("d") < 4, lambda: 2 * x, lambda: tf.sin(x))

    return manual_region(body, [ROWS], ROWS)(x)


_x, _w = floats(4, 8), floats(8, 6)

CASES = [
    Case(
        "local gather of section 3.2",
        _local_gather,
        (floats(16, 6, 4), ints(3, 16, 5, below=6)),
        splits=(("d", None, None), (None, "d", None)),
        reference=_global_gather,
        forward={},
        backward={},
        several_processes=True,
    ),
    Case("copies along one axis: their gradients are summed", _grid(_relu, [ON_A, WHOLE], ON_A), (_x, _w), "a:2,b:4",
        reference=_relu, forward={}, several_processes=True),
    Case(
        "copies in, cut out and copies out",
        _grid(_two_matrices, [("a", None), (None, "b")], [("a", "b"), ("a", "b")]),
        (_x, floats(8, 8)),
        "a:2,b:4",
        reference=_two_matrices,
        forward={},
    ),
    Case("all_reduce along one axis", _grid(_normalised, [ON_A], ON_A), (_x,), "a:2,b:4",
        reference=lambda x: x / (1.0 + tf.reduce_sum(x * x, 0, keepdims=True)), forward={"all-reduce": 1}),
    Case(
        "rotate by one",
        lambda x: manual_region(lambda x: x * rotate(x, "d"), [ROWS], ROWS)(x),
        (floats(8, 4),),
        reference=lambda x: x * tf.roll(x, -1, 0),
        forward={"collective-permute": 1},
        backward={"collective-permute": 2},
        several_processes=True,
    ),
    Case(
        "rotate by three along one of two axes",
        _grid(lambda x: x * rotate(x, "b", GRID, 3), [("b", None)], ("b", None)),
        (_x,),
        "a:2,b:4",
        reference=lambda x: x * tf.roll(x, -3, 0),
        forward={"collective-permute": 1},
    ),
    Case("a region between automatic parts that use its constants", _between_automatic_parts, (floats(16, 8), _w),
        reference=_cumsum_reference),
    Case("a loop in a region", lambda x: manual_region(lambda x: _three_times(x, _step), [ROWS], ROWS)(x),
        (0.5 * floats(8, 4),), reference=_loop_reference, forward={}, backward={}),
    Case(
        "a region in a loop",
        # The loop counter goes into the region, like all tensors.
        lambda x: _three_times(x, manual_region(_step, [ROWS, ()], ROWS)),
        (0.5 * floats(8, 4),),
        reference=_loop_reference,
        forward={},
        backward={},
    ),
    Case("devices that take different branches", _branch, (floats(8, 4),),
        reference=lambda x: tf.concat([2 * x[:4], tf.sin(x[4:])], 0), forward={}),
    Case(
        "a region's own mesh is in force inside",
        lambda x: manual_region(_numbered_and_rotated, [("e", None)], ("e", None), TURNED)(x),
        (floats(8, 4),),
        splits=(ROWS,),
        reference=lambda x: tf.roll(x, -1, 0) + tf.range(8.0)[:, tf.newaxis],
        forward={"collective-permute": 2},  # in, and round
        whole=True,
    ),
    Case(
        "a region of one axis that has one device",
        lambda x: manual_region(_relu_alone, [("a", "b")], ("a", "b"), Mesh.parse("a:1,b:8"), "a")(
            x
        ),
        (floats(2, 8),),
        "a:1,b:8",
        splits=(("a", "b"),),
        reference=_relu_alone,
        forward={},
        backward={},
    ),
    Case(
        "a region of one axis, the other one automatic",
        lambda x, w: mesh_split(
            _grid(_relu, [("a", "b"), ("b", None)], ON_A, "a")(x, w), GRID, ON_A
        ),
        (_x, _w),
        "a:2,b:4",
        splits=(("a", "b"), ("b", None)),
        reference=_relu,
        forward={"all-reduce": 1},  # the contraction over b, by the partitioner, inside the region
    ),
]  # fmt: skip
