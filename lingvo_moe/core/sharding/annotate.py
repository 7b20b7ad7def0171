"""The paper's annotation API (section 3.2, appendix A.3): replicate, split, shard, mesh_split.

An annotation changes no value and no logical shape. It says how XLA's SPMD partitioner is to cut
the tensor over the devices of the mesh in force, and it stays on the gradient. The mesh is put in
force by the engines while they trace a function; with none in force an annotation would do nothing,
and raises instead.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.compiler.xla.experimental import xla_sharding

from lingvo_moe.core.sharding.letters import (
    DimsMapping,
    SplitMap,
    check_mapping,
    dims_mapping,
)
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError, current_mesh


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Every device holds the whole tensor.

    Raises:
        ShardingError: no mesh is in force.
    """
    mesh = _mesh_for("replicate", tensor)
    return tensor if mesh.size == 1 else _apply(xla_sharding.Sharding.replicate(), tensor)


def split(tensor: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
    """Cuts one dimension into equal parts, part i on device i; the last part may be smaller.

    With fewer partitions than devices each part is held by `devices / num_partitions` consecutive
    devices.

    Raises:
        ShardingError: no mesh is in force; no such dimension; more partitions than devices or than
            elements; or a number of partitions that does not divide the number of devices.
    """
    mesh = _mesh_for("split", tensor)
    what = f"split({_name(tensor)}, {split_dimension}, {num_partitions})"
    shape = _static_shape(tensor, what)
    if not 0 <= split_dimension < len(shape):
        raise ShardingError(f"{what}: shape {shape} has dimensions 0..{len(shape) - 1}")
    if num_partitions < 1 or num_partitions > mesh.size or mesh.size % num_partitions:
        raise ShardingError(
            f"{what}: the number of partitions must divide the {mesh.size} devices of mesh {mesh}"
        )
    size = shape[split_dimension]
    if size is not None and size < num_partitions:
        raise ShardingError(
            f"{what}: dimension {split_dimension} of shape {shape} has {size} elements, fewer "
            f"than {num_partitions} partitions"
        )
    tiles = [num_partitions if d == split_dimension else 1 for d in range(len(shape))]
    return _tile(tensor, mesh.device_array().reshape([*tiles, mesh.size // num_partitions]), mesh)


def shard(tensor: tf.Tensor, device_assignment: np.ndarray | Sequence) -> tf.Tensor:
    """Cuts several dimensions at once and says which device holds which part (appendix A.3).

    Args:
        tensor: of rank R.
        device_assignment: integers of rank R whose shape is the number of parts per dimension and
            whose elements are logical device numbers, each of 0..devices-1 once: a [3, 16, 64]
            tensor under a [1, 2, 4] assignment has [3, 8, 16] parts.

    Raises:
        ShardingError: no mesh is in force; another rank; more parts than elements; a device
            missing, twice, or unknown.
    """
    mesh = _mesh_for("shard", tensor)
    devices = np.asarray(device_assignment)
    what = f"shard({_name(tensor)}, device_assignment of shape {list(devices.shape)})"
    shape = _static_shape(tensor, what)
    if devices.ndim != len(shape):
        raise ShardingError(f"{what}: the tensor has {len(shape)} dimensions, shape {shape}")
    if sorted(devices.flatten().tolist()) != list(range(mesh.size)):
        raise ShardingError(
            f"{what}: holds devices {devices.flatten().tolist()}, expected each of 0..{mesh.size - 1} once"
        )
    for dim, (size, parts) in enumerate(zip(shape, devices.shape, strict=True)):
        if size is not None and size < parts:
            raise ShardingError(
                f"{what}: dimension {dim} of shape {shape} has {size} elements, fewer than {parts} partitions"
            )
    return _tile(tensor, devices[..., np.newaxis], mesh)


def mesh_split(tensor: tf.Tensor, mesh: Mesh, mapping: DimsMapping) -> tf.Tensor:
    """Cuts each dimension along the mesh axes that `mapping` names; axes that it does not name hold
    copies (partial tiling).

    Args:
        tensor: of rank R.
        mesh: a mesh over the devices of the mesh in force; it may arrange them differently.
        mapping: R entries: an axis name, a tuple of them (major first), or None for a dimension
            left whole.

    Raises:
        ShardingError: no mesh is in force; meshes of different sizes; another rank; an unknown or
            doubly used axis; more partitions than elements.
    """
    ambient = _mesh_for("mesh_split", tensor)
    what = f"mesh_split({_name(tensor)}, {mesh}, {mapping})"
    if mesh.size != ambient.size:
        raise ShardingError(
            f"{what}: {mesh.size} devices, but the mesh in force, {ambient}, has {ambient.size}"
        )
    check_mapping(what, _static_shape(tensor, what), tuple(mapping), mesh)
    if mesh.size == 1:
        return tensor
    per_dim = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in mapping]
    tiles = [mesh.axis_size(axes) for axes in per_dim]
    order = [a for axes in per_dim for a in axes]
    order += [a for a in mesh.axis_names if a not in order]
    devices = mesh.device_array().transpose([mesh.axis_names.index(a) for a in order])
    return _tile(tensor, devices.reshape([*tiles, -1]), mesh)


def shard_letters(
    tensor: tf.Tensor, letters: str, split_map: SplitMap, name: str = ""
) -> tf.Tensor:
    """`mesh_split` on the mesh in force, by einsum letters (see `letters.dims_mapping`).

    On a mesh of one device there is nothing to cut, whatever the map names.

    Raises:
        ShardingError: as `mesh_split`.
    """
    mesh = _mesh_for("shard_letters", tensor)
    if mesh.size == 1:
        return tensor
    return mesh_split(tensor, mesh, dims_mapping(letters, split_map, name))


def _mesh_for(what: str, tensor: tf.Tensor) -> Mesh:
    mesh = current_mesh()
    if mesh is None:
        raise ShardingError(
            f"{what}({_name(tensor)}): no mesh is in force, so this annotation could not "
            "take effect. Lower the function with an "
            "engine, or trace it under sharding.use_mesh(mesh)"
        )
    return mesh


def _tile(tensor: tf.Tensor, devices: np.ndarray, mesh: Mesh) -> tf.Tensor:
    """Annotates with tiles; the last dimension of `devices` counts the copies of each part."""
    if mesh.size == 1:
        return tensor
    copies = devices.shape[-1]
    if copies == mesh.size:
        return _apply(xla_sharding.Sharding.replicate(), tensor)
    if copies == 1:
        return _apply(xla_sharding.Sharding.tile(devices[..., 0]), tensor)
    return _apply(xla_sharding.Sharding.partial_tile(devices), tensor)


def _apply(sharding: xla_sharding.Sharding, tensor: tf.Tensor) -> tf.Tensor:
    # Only the sharding *operation* survives lowering; the attribute that is the default would be
    # lost without a word.
    return sharding.apply_to_tensor(tensor, use_sharding_op=True)


def _static_shape(tensor: tf.Tensor, what: str) -> list[int | None]:
    if tensor.shape.rank is None:
        raise ShardingError(f"{what}: the tensor's rank is not known")
    return tensor.shape.as_list()


def _name(tensor: tf.Tensor) -> str:
    if isinstance(tensor, tf.Tensor) and not tf.executing_eagerly():
        return tensor.name
    return f"tensor of shape {list(getattr(tensor, 'shape', ()))}"
