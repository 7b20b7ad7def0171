"""One branch of a computation for each position along a mesh axis: a device computes its own branch only."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_moe.core.sharding.annotate import mesh_split
from lingvo_moe.core.sharding.letters import Axis, axes_of
from lingvo_moe.core.sharding.manual import device_index, manual_region
from lingvo_moe.core.sharding.mesh import current_mesh, single_device, use_mesh


def stacked_rows(
    rows: Sequence[Callable[[tf.Tensor], tf.Tensor]], x: tf.Tensor, axis: Axis
) -> tf.Tensor:
    """`tf.stack([row(x) for row in rows])` for rows that are vectors, sharded by rows.

    Where the mesh in force has one device along `axis` for each row, a device computes its own row alone.

    Args:
        rows: functions of `x` whose results have one shape [P] and type. They annotate nothing.
        x: a tensor that every row sees.
        axis: the mesh axis or axes of the rows, or None.

    Raises:
        ShardingError: the mesh has no such axis.
    """
    mesh, axes = current_mesh(), axes_of(axis)
    if mesh is None or mesh.size == 1 or not axes or mesh.axis_size(axes) != len(rows):
        with use_mesh(single_device()):
            stacked = tf.stack([row(x) for row in rows])
        if mesh is None or mesh.size == 1 or not axes:
            return stacked
        return mesh_split(stacked, mesh, (axes, None))

    def own_row(local: tf.Tensor) -> tf.Tensor:
        index = tf.constant(0)
        for name in axes:
            index = index * mesh.axis_size(name) + device_index(name, mesh)
        with use_mesh(single_device()):
            branches = [lambda row=row: row(local)[tf.newaxis] for row in rows]
            return tf.switch_case(index, branches)

    region = manual_region(own_row, [(None,) * x.shape.rank], (axes, None), mesh)
    return region(x)
