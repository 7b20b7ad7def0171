"""Cases: operators that join, repeat or rearrange tensors (section 3.3.3), and those that read single elements.

As in cases_data_formatting, the operand is a computed tensor sharded by rows, and the result is annotated as sharded
too.
"""

import tensorflow as tf
from cases_data_formatting import EVEN, LOCAL, ODD, ONE_GATHER, formatted, permutes
from spmd_case import floats, moves

from lingvo_moe.core.sharding import split

# Differs: pieces that meet along the sharded dimension are gathered, and so is what is made of them. To move
# rows on by some, slice and pad: that is a halo.
CONCATENATIONS = [
    formatted(
        "concat_uneven",
        lambda a, b: tf.concat([a, split(b + 5, 0, 8)], 0),
        ODD,
        floats(10, 4),
        forward={"all-gather": 2},
    ),
    formatted(
        "concat",
        lambda a, b: tf.concat([a, split(b + 5, 0, 8)], 0),
        EVEN,
        floats(16, 4, seed=1),
        forward={"all-gather": 2},
    ),
    formatted(
        "concat_three", lambda a, b: tf.concat([a, b, a], 0), ODD, floats(3, 4), forward=ONE_GATHER
    ),
    formatted(
        "concat_the_other",
        lambda a, b: tf.concat([a, split(b + 5, 0, 8)], 1),
        ODD,
        floats(15, 2),
        forward=LOCAL,
        gradient=LOCAL,
    ),
    formatted(
        "shift_by_concat",
        lambda a: tf.concat([tf.zeros([1, 4]), a[:-1]], 0),
        ODD,
        forward=ONE_GATHER,
        gradient=permutes(1),
    ),
    formatted(
        "shift_by_pad",
        lambda a: tf.pad(a[:-1], [[1, 0], [0, 0]]),
        ODD,
        inspect=moves(("collective-permute", 16)),
        gradient=permutes(1),
    ),
    formatted(
        "roll", lambda a: tf.roll(a, 1, 0), EVEN, forward={"all-gather": 1, "collective-permute": 3}
    ),
    formatted(
        "roll_uneven",
        lambda a: tf.roll(a, -7, 0),
        ODD,
        forward={"all-gather": 1, "collective-permute": 3},
    ),
    formatted("roll_the_other", lambda a: tf.roll(a, 1, 1), ODD, forward=LOCAL),
    formatted("stack_minor", lambda a: tf.stack([a, a + 1], 1), ODD, forward=LOCAL, gradient=LOCAL),
    # Nine rows, each sent to one device; a product with a vector is better.
    formatted(
        "unstack",
        lambda a: tf.add_n([b * (i + 1.0) for i, b in enumerate(tf.unstack(a))]),
        floats(9, 4),
        to=None,
        forward={"collective-permute": 7, "all-reduce": 1},
    ),
    formatted(
        "unstack_the_other",
        lambda a: tf.add_n([b * (i + 1.0) for i, b in enumerate(tf.unstack(a, axis=1))]),
        ODD,
        forward=LOCAL,
        gradient=LOCAL,
    ),
    formatted(
        "split_and_concat",
        lambda a: tf.concat([b * (i + 1.0) for i, b in enumerate(tf.split(a, [4, 5, 6], 0))], 0),
        ODD,
        forward={"collective-permute": 6, "all-reduce": 1, "all-gather": 2},
    ),
]

REPETITIONS = [
    formatted("tile_cut", lambda a: tf.tile(a, [2, 1]), ODD, forward=ONE_GATHER),
    formatted("tile_the_other", lambda a: tf.tile(a, [1, 3]), ODD, forward=LOCAL),
    formatted("repeat_cut", lambda a: tf.repeat(a, 2, axis=0), ODD, forward=LOCAL, gradient=LOCAL),
    formatted(
        "broadcast_in_between",
        lambda a: tf.broadcast_to(a[:, None], [15, 3, 4]),
        ODD,
        forward=LOCAL,
        gradient=LOCAL,
    ),
    formatted(
        "broadcast_major", lambda a: tf.broadcast_to(a, [3, 15, 4]), ODD, to=1, forward=LOCAL
    ),
    formatted(
        "broadcast_into_cut",
        lambda a, b: a * b,
        ODD,
        floats(4),
        forward=LOCAL,
        gradient={"all-reduce": 1},
    ),
    formatted(
        "diagonal",
        lambda a: tf.linalg.diag_part(a),
        floats(15, 15),
        forward={"all-gather": 1, "all-reduce": 1},
    ),
    formatted("diagonal_matrix", lambda a: tf.linalg.diag(a), floats(15), forward=ONE_GATHER),
    formatted(
        "band_part",
        lambda a: tf.linalg.band_part(a, 1, 2),
        floats(15, 15),
        forward=LOCAL,
        gradient=LOCAL,
    ),
]

ELEMENTWISE = [
    formatted("positions", lambda a: a * tf.range(15.0)[:, None], ODD, forward=LOCAL),
    formatted(
        "elementwise_chain",
        lambda a: tf.nn.softplus(tf.tanh(a) ** 2 + 1.0) / (1.0 + a * a),
        ODD,
        forward=LOCAL,
        gradient=LOCAL,
    ),
    formatted(
        "casts", lambda a: tf.cast(tf.cast(10 * a, tf.int32) // 2, tf.float32), ODD, forward=LOCAL
    ),
    formatted(
        "bits",
        lambda a: tf.bitcast(tf.bitwise.bitwise_xor(tf.bitcast(a, tf.int32), 1), tf.float32),
        ODD,
        forward=LOCAL,
    ),
    formatted(
        "clip_and_compare",
        lambda a: tf.where(a > 0, tf.clip_by_value(a, -1.0, 1.0), 2 * a),
        ODD,
        forward=LOCAL,
    ),
]

CASES = [*CONCATENATIONS, *REPETITIONS, *ELEMENTWISE]
