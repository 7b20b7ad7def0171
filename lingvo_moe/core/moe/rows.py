"""Expert inputs and outputs without capacity slots: rows sorted by expert, in groups of any size.

Letters: D devices, N rows of a device, E expert, e experts of a device, M model, H hidden.
"""

from dataclasses import dataclass, field, replace

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Axis, DimsMapping
from lingvo_moe.core.sharding.letters import axes_of
from lingvo_moe.core.sharding.manual import all_reduce, manual_region


@dataclass(frozen=True)
class Rows:
    """What a dispatcher without capacity gives to the experts, and takes back from them.

    Attributes:
        values: [D,N,M], the rows that each device's experts compute, those of its first expert first;
            rows beyond the groups are of no meaning, and zero.
        group_sizes: int32 [D,e], how many rows each expert has.
        choices: int32 [D,N], the number of the choice that each row is: s k + rank, tokens s counted over
            the whole batch. What is drawn at random for a row hangs on this, not on where it lies.
        devices: the mesh axes that D is cut along, all devices that hold tokens.
        experts: the mesh axes that the experts are cut along.
        expected: about how many rows of N are filled; for speed only.
        notes: what `Combine` needs to know of `Dispatch`.
        metrics: float32 scalars, of what was dropped on the way.
    """

    values: tf.Tensor
    group_sizes: tf.Tensor
    choices: tf.Tensor
    devices: Axis = None
    experts: Axis = None
    expected: int | None = None
    notes: tuple = ()
    metrics: NestedMap = field(default_factory=NestedMap)

    def With(self, values: tf.Tensor) -> "Rows":
        """The same rows with other values, [D,N,anything]."""
        return replace(self, values=values)

    def MatMul(self, weights_EMH: tf.Tensor, mapping: DimsMapping) -> "Rows":
        """Each row times the matrix of its expert, on the device that holds both.

        Args:
            weights_EMH: [E,M,H], in the type of the rows.
            mapping: the mesh axes that the weights' dimensions are cut along. Of those that rows are
                cut along, only the experts' own count: along the others weights are gathered.
        """
        taken = set(axes_of(self.devices))
        inner, outer = (None if taken & set(axes_of(a)) else a for a in mapping[1:])

        def multiply(x: tf.Tensor, sizes: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
            matmul = kernels.current().grouped_matmul
            y = matmul(x[0], weights, sizes[0], self.expected)[tf.newaxis]
            return y if inner is None else all_reduce(y, inner)

        region = manual_region(
            multiply,
            [(self.devices, None, inner), (self.devices, None), (self.experts, inner, outer)],
            (self.devices, None, outer),
        )
        return self.With(region(self.values, self.group_sizes, weights_EMH))
