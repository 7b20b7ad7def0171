"""Redistribution of a tensor as an operation: from one sharding to another by the plan's collectives.

A plain annotation behind another leaves the way to the partitioner. `redistribute` plans it
(`redistribution_plan`) and annotates every state on the way, and the partitioner
does each step as it stands. Its gradient is the redistribution back, planned by itself: what was
free one way (a slice) is an all-gather the other way.
"""

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2

from lingvo_moe.core.sharding import annotate
from lingvo_moe.core.sharding.letters import DimsMapping, check_mapping, tile_devices
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError
from lingvo_moe.core.sharding.redistribution_plan import (
    Layout,
    Step,
    plan_redistribution,
    total_bytes,
)

__all__ = ["Layout", "Step", "plan_redistribution", "redistribute", "total_bytes"]


def redistribute(
    tensor: tf.Tensor,
    source: DimsMapping | Layout,
    target: DimsMapping | Layout,
    mesh: Mesh | None = None,
) -> tf.Tensor:
    """The tensor, cut as `source` until here and as `target` from here on.

    The gradient comes back the same way: a cotangent is brought from `target` to `source` by the
    cheapest plan in that direction. Values do not change.

    Args:
        tensor: of a static shape.
        source, target: a mapping, one mesh axis, axes or None for each dimension, or (mesh, mapping)
            where the mesh arranges the same devices differently.
        mesh: of bare mappings; by default the mesh in force.

    Raises:
        ShardingError: no mesh is in force; a shape that is not static; a mapping that does not fit
            the tensor or its mesh; meshes of different sizes; a tensor that is annotated, but not
            as `source` says.
    """
    what = f"redistribute({annotate.name_of(tensor)}"
    ambient = annotate.mesh_of(f"{what})", None)
    mesh = annotate.mesh_of(f"{what})", mesh)
    tensor = tf.convert_to_tensor(tensor)
    shape = tensor.shape
    if not shape.is_fully_defined():
        raise ShardingError(f"{what}): the shape {shape} is not static, so no plan can be made")
    layouts = []
    for name, value in (("source", source), ("target", target)):
        own, mapping = _layout(value, mesh)
        argument = f"{what}, {name}={mapping})"
        if own.size != ambient.size:
            raise ShardingError(
                f"{argument}: mesh {own} has {own.size} devices, but the mesh in force, {ambient}, "
                f"has {ambient.size}"
            )
        check_mapping(argument, shape.as_list(), mapping, own)
        layouts.append((own, tuple(mapping)))
    if ambient.size == 1:
        return tensor
    _check_source(f"{what}, source={layouts[0][1]})", tensor, layouts[0])
    with tf.name_scope("redistribute"):
        return _redistribute(tensor, layouts[0], layouts[1], ambient)


def _redistribute(tensor: tf.Tensor, source: Layout, target: Layout, ambient: Mesh) -> tf.Tensor:
    plan = plan_redistribution(tensor.shape.as_list(), tensor.dtype.size, source, target)
    scope = tf.get_current_name_scope()

    @tf.custom_gradient
    def run(x: tf.Tensor):
        y = annotate.mesh_split(x, *source)
        for step in plan:
            y = annotate.tile(y, step.assignment(), ambient)

        def gradient(dy: tf.Tensor) -> tf.Tensor:
            with tf.name_scope(f"{scope}/gradient/"):  # so that its collectives can be told
                return _redistribute(dy, target, source, ambient)

        return y, gradient

    return run(tensor)


def _layout(value: DimsMapping | Layout, mesh: Mesh) -> Layout:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Mesh):
        return value
    return mesh, value


def _check_source(what: str, tensor: tf.Tensor, source: Layout) -> None:
    """Raises where the tensor carries an annotation that is not `source`."""
    if tf.executing_eagerly() or not hasattr(tensor, "op"):
        return
    op = tensor.op
    while op.type == "Identity":
        op = op.inputs[0].op
    if op.type != "XlaSharding":
        return
    proto = xla_data_pb2.OpSharding.FromString(op.get_attr("sharding"))
    if proto.type == xla_data_pb2.OpSharding.REPLICATED:
        tiles = (1,) * tensor.shape.rank
        devices = np.arange(source[0].size)
    elif proto.type == xla_data_pb2.OpSharding.OTHER and proto.tile_assignment_devices:
        tiles = tuple(proto.tile_assignment_dimensions)[: tensor.shape.rank]
        devices = np.array(proto.tile_assignment_devices)
    else:
        return
    wanted = tile_devices(source[1], source[0])
    copies = wanted.shape[-1]
    if tiles != wanted.shape[:-1] or (_parts(devices, copies) != _parts(wanted, copies)).any():
        raise ShardingError(
            f"{what}: but the tensor is annotated there ({op.name}) as cut into {list(tiles)} parts "
            f"on devices {devices.tolist()}; give the sharding that it has as the source"
        )


def _parts(devices: np.ndarray, copies: int) -> np.ndarray:
    """For each device the number of the part that it holds; holders stand side by side."""
    part = np.empty(devices.size, np.int64)
    part[devices.flatten()] = np.arange(devices.size) // copies
    return part
