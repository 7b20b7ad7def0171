"""Redistributes a tensor from one sharding to another by planned collectives.

Between two annotations the partitioner chooses the collectives. `redistribute` plans them
(`redistribution_plan`) and annotates every intermediate sharding, so that the partitioner does the
planned steps. The gradient is the redistribution back, planned separately: a step that is free one way
(a slice) is an all-gather the other way.
"""

from typing import cast

import numpy as np
import tensorflow as tf

from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.sharding import annotate
from lingvo_moe.core.sharding.letters import DimsMapping, check_mapping, tile_devices
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError
from lingvo_moe.core.sharding.redistribution_plan import (
    Layout,
    Move,
    plan_redistribution,
    total_bytes,
)
from lingvo_moe.core.tensors import origin

__all__ = ["Layout", "Move", "plan_redistribution", "redistribute", "total_bytes"]

_Layout = tuple[Mesh, DimsMapping]


def redistribute(
    tensor: tf.Tensor,
    source: DimsMapping | Layout,
    target: DimsMapping | Layout,
    mesh: Mesh | str | None = None,
) -> tf.Tensor:
    """Changes the sharding of a tensor from `source` to `target`; values do not change.

    The gradient goes from `target` to `source`, by the cheapest plan in that direction.

    Args:
        tensor: of a static shape.
        source, target: a mapping (a mesh axis, axes or None for each dimension), or (mesh, mapping)
            if the mesh arranges the same devices differently.
        mesh: the mesh of bare mappings; by default the mesh in force.

    Raises:
        ShardingError: no mesh is in force; a shape that is not static; a mapping that does not fit
            the tensor or its mesh; meshes of different sizes; a tensor with another annotation than
            `source`.
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
        layout_mesh, mapping = _layout(value, mesh)
        argument = f"{what}, {name}={mapping})"
        if layout_mesh.size != ambient.size:
            raise ShardingError(
                f"{argument}: mesh {layout_mesh} has {layout_mesh.size} devices, but the mesh in force, {ambient}, "
                f"has {ambient.size}"
            )
        check_mapping(argument, shape.as_list(), mapping, layout_mesh)
        layouts.append((layout_mesh, tuple(mapping)))
    if ambient.size == 1:
        return tensor
    _check_source(f"{what}, source={layouts[0][1]})", tensor, layouts[0])
    with tf.name_scope("redistribute"):
        return _redistribute(tensor, layouts[0], layouts[1], ambient)


def _redistribute(tensor: tf.Tensor, source: _Layout, target: _Layout, ambient: Mesh) -> tf.Tensor:
    plan = plan_redistribution(tensor.shape.as_list(), tensor.dtype.size, source, target)
    scope = tf.get_current_name_scope()

    @private.custom_gradient
    def run(x: tf.Tensor):
        y = annotate.mesh_split(x, *source)
        for step in plan:
            y = annotate.tile(y, step.assignment(), ambient)

        def gradient(dy: tf.Tensor) -> tf.Tensor:
            with tf.name_scope(f"{scope}/gradient/"):  # names its collectives
                return _redistribute(dy, target, source, ambient)

        return y, gradient

    return run(tensor)


def _layout(value: DimsMapping | Layout, mesh: Mesh) -> _Layout:
    if isinstance(value, tuple) and len(value) == 2 and ":" in str(value[0]):  # a mesh, and no axis
        first, mapping = cast(Layout, value)
        return Mesh.parse(first), mapping
    return mesh, cast(DimsMapping, value)


def _check_source(what: str, tensor: tf.Tensor, source: _Layout) -> None:
    """Raises ShardingError if the tensor has another annotation than `source`."""
    if tf.executing_eagerly() or not hasattr(tensor, "op"):
        return
    op = origin(tensor, ("Identity",)).op
    if op.type != "XlaSharding":
        return
    devices = annotate.read_tiles(op.get_attr("sharding"), tensor.shape.rank, source[0])
    if devices is None:
        return
    wanted = tile_devices(source[1], source[0])
    if not np.array_equal(np.sort(devices, -1), np.sort(wanted, -1)):
        raise ShardingError(
            f"{what}: but the tensor is annotated ({op.name}) with {list(devices.shape[:-1])} parts "
            f"on devices {devices.flatten().tolist()}; give its own sharding as the source"
        )
