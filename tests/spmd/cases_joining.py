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
    formatted("concat", lambda a, b: tf.concat([a, split(b + 5, 0, 8)], 0), EVEN, floats(16, 4, seed=1),
        forward={"all-gather": 2}),
    formatted("shift_by_pad", lambda a: tf.pad(a[:-1], [[1, 0], [0, 0]]), ODD,
        inspect=moves(("collective-permute", 16)), gradient=permutes(1)),
    formatted("roll", lambda a: tf.roll(a, 1, 0), EVEN, forward={"all-gather": 1, "collective-permute": 3}),
]  # fmt: skip

REPETITIONS = [formatted("tile_cut", lambda a: tf.tile(a, [2, 1]), ODD, forward=ONE_GATHER)]

ELEMENTWISE = [
    formatted("elementwise_chain", lambda a: tf.nn.softplus(tf.tanh(a) ** 2 + 1.0) / (1.0 + a * a), ODD, forward=LOCAL,
        gradient=LOCAL),
    formatted("casts", lambda a: tf.cast(tf.cast(10 * a, tf.int32) // 2, tf.float32), ODD, forward=LOCAL),
]  # fmt: skip

CASES = [*CONCATENATIONS, *REPETITIONS, *ELEMENTWISE]
