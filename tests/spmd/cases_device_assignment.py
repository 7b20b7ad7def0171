"""Cases: which device holds which part (appendix A.3, figure 10; section 3.3.1, CollectivePermute).

A tensor goes from one assignment to another by one collective-permute whose pairs are the two
assignments read side by side: who holds a part now, who shall hold it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from spmd_case import Case, devices_of, floats
from tensorflow.python.compiler.xla.experimental import xla_sharding

from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.annotate import mesh_split, shard

# Figure 10: a tensor in 2x4 parts that speak with those beside them in a row, on devices numbered row
# by row. Our text of the paper has not the figure's numbers; these are for devices wired as 4 rows of 2,
#     0 1
#     2 3
#     4 5
#     6 7
# where a row of parts on devices 0 1 2 3 has to go from 1 to 2 diagonally, and one on 0 1 3 2 is a ring.
ROW_MAJOR = np.arange(8).reshape(2, 4)
RINGS = np.array([[0, 1, 3, 2], [4, 5, 7, 6]])
WIRED = np.arange(8).reshape(4, 2)


def hops(source: int, target: int) -> int:
    """Links of `WIRED` between two devices."""
    return abs(source // 2 - target // 2) + abs(source % 2 - target % 2)


def pairs(now: np.ndarray, then: np.ndarray) -> list[tuple[int, int]]:
    """Returns the permutation from one assignment to another."""
    return sorted((int(a), int(b)) for a, b in zip(now.flat, then.flat, strict=True))


def permutes(*wanted: Sequence[tuple[int, int]]) -> Callable[[str], None]:
    """Checks, as a `Case.inspect`, that the collective-permutes are exactly these, in any order."""

    def inspect(hlo: str) -> None:
        have = devices_of(hlo, "collective-permute")
        assert sorted(have) == sorted(sorted(p) for p in wanted), have

    return inspect


def reassigned(now: np.ndarray, then: np.ndarray) -> Callable[[tf.Tensor], tf.Tensor]:
    """A product with each part on one device, and then on another."""
    return lambda x: shard(shard(x, now) * 2, then)


def _permutation(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).permutation(8).reshape(shape)


def _reassigned_case(name: str, now: np.ndarray, then: np.ndarray, **rest) -> Case:
    return Case(
        name,
        reassigned(now, then),
        (floats(4, 8),),
        forward={"collective-permute": 1},
        backward={"collective-permute": 1},
        whole=True,
        inspect=permutes(pairs(now, then)),
        **rest,
    )


REASSIGNED = [
    _reassigned_case("figure_10", ROW_MAJOR, RINGS, several_processes=True),
    _reassigned_case("random_0", _permutation(0, 2, 4), _permutation(100, 2, 4)),
]


def row_halos(assignment: np.ndarray) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """A convolution along the rows of parts: each part exchanges halos with its neighbours."""
    parts = assignment[..., np.newaxis]
    return lambda x, w: shard(tf.nn.conv1d(shard(x, parts), w, 1, "SAME"), parts)


def _row_pairs(assignment: np.ndarray) -> list[list[tuple[int, int]]]:
    right = pairs(assignment[:, :-1], assignment[:, 1:])
    return [right, [(b, a) for a, b in right]]


FIGURE_10 = [
    Case("rows_rings", row_halos(RINGS), (floats(2, 16, 3), floats(3, 3, 2)), forward={"collective-permute": 2},
        backward={"collective-permute": 4, "all-reduce": 2}, whole=True, inspect=permutes(*_row_pairs(RINGS))),
]  # fmt: skip

IN_ORDER, MIXED = np.arange(8), np.array([3, 1, 4, 0, 5, 7, 2, 6])


def summed(x, y):
    return shard(shard(x, ROW_MAJOR) + shard(y, RINGS), ROW_MAJOR)


def contracted(x, y):
    return shard(x, IN_ORDER.reshape(1, 8)) @ shard(y, MIXED.reshape(8, 1))


OPERANDS = [
    Case("sum_of_two_assignments", summed, (floats(4, 8), floats(4, 8, seed=1)), forward={"collective-permute": 1},
        backward={"collective-permute": 1}, whole=True),
    # The parts of one operand move to the devices of the other's; then the product is local.
    Case(
        "contracted_over_two_assignments",
        contracted,
        (floats(4, 8), floats(8, 4)),
        forward={"collective-permute": 1, "all-reduce": 1},
        backward={"collective-permute": 2},
        whole=True,
        inspect=permutes(pairs(IN_ORDER, MIXED)),
        several_processes=True,
    ),
]  # fmt: skip

MESH = Mesh(("a", "b"), (2, 4))
RING_MESH = Mesh(("a", "b"), (2, 4), device_ids=tuple(RINGS.flat))
MESHES = [
    Case(
        "mesh_to_mesh",
        lambda x: mesh_split(mesh_split(x, MESH, ("a", "b")) * 2, RING_MESH, ("a", "b")),
        (floats(8, 8),),
        forward={"collective-permute": 1},
        backward={"collective-permute": 1},
        whole=True,
        inspect=permutes(pairs(MESH.device_array(), RING_MESH.device_array())),
    )
]

CASES = [*REASSIGNED, *FIGURE_10, *OPERANDS, *MESHES]


def held(assignment: np.ndarray) -> Callable[[tf.Tensor], tf.Tensor]:
    """x -> [devices, elements of a part]: row d is what device d holds of x under the assignment.

    In a manual region each device takes its part as it is, and what it returns is row d of a tensor
    that is sharded row by row over devices in order.
    """

    def fn(x: tf.Tensor) -> tf.Tensor:
        proto = xla_sharding.Sharding.tile(assignment).proto.SerializeToString()
        part = xla_sharding.auto_to_manual_spmd_partition(shard(x, assignment), proto)
        row = tf.reshape(part, [1, -1])
        in_order = xla_sharding.Sharding.tile(np.arange(8).reshape(8, 1)).proto.SerializeToString()
        return xla_sharding.manual_to_auto_spmd_partition(
            row, in_order, [8, x.shape.num_elements() // 8]
        )

    return fn
