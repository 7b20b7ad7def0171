"""The paper's annotation API (section 3.2, appendix A.3): replicate, split, shard, mesh_split.

An annotation changes no value and no global shape. It tells XLA's SPMD partitioner how to shard the
tensor over the devices of the mesh in force, and applies to the gradient too. Engines set the mesh
while they trace a function. Without a mesh an annotation could have no effect, and raises an error.
"""

import contextlib
import contextvars
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core.private.tensorflow import xla_data_pb2, xla_sharding
from lingvo_moe.core.sharding.letters import (
    DimsMapping,
    SplitMap,
    axes_of,
    axis_of,
    check_mapping,
    dims_mapping,
    read_tile_devices,
    tile_devices,
)
from lingvo_moe.core.sharding.mesh import (
    Mesh,
    ShardingError,
    Slice,
    current_mesh,
    holding,
    traced_slices,
)
from lingvo_moe.core.tensors import origin


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Replicates a tensor on every device.

    Raises:
        ShardingError: no mesh is in force.
    """
    mesh = mesh_in_force("replicate", tensor)
    return tensor if mesh.size == 1 else _apply(xla_sharding.Sharding.replicate(), tensor)


def split(tensor: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
    """Splits one dimension into equal parts, part i on device i; the last part may be smaller.

    With fewer partitions than devices each part is held by `devices / num_partitions` consecutive
    devices.

    Raises:
        ShardingError: no mesh is in force; no such dimension; more partitions than devices or than
            elements; or a number of partitions that does not divide the number of devices.
    """
    mesh = mesh_in_force("split", tensor)
    what = f"split({name_of(tensor)}, {split_dimension}, {num_partitions})"
    shape = static_shape(tensor, what)
    _check_dimension(what, split_dimension, shape)
    if not isinstance(num_partitions, (int, np.integer)) or isinstance(num_partitions, bool):
        raise ShardingError(f"{what}: the number of partitions is an integer")
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
    return tile(tensor, mesh.device_array().reshape([*tiles, mesh.size // num_partitions]), mesh)


def shard(tensor: tf.Tensor, device_assignment: np.ndarray | Sequence) -> tf.Tensor:
    """Splits several dimensions at once, with an explicit device for each part (appendix A.3).

    If the assignment has one dimension more than the tensor, its last dimension lists the devices that
    hold copies of a part (subgroups): under [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]] a matrix has four
    bands of rows, and devices 0 and 4 both hold the first.

    Args:
        tensor: of rank R.
        device_assignment: integers of rank R whose shape is the number of parts per dimension and
            whose elements are logical device numbers, each of 0..devices-1 once: a [3, 16, 64]
            tensor under a [1, 2, 4] assignment has [3, 8, 16] parts. Or of rank R+1: parts per
            dimension, then copies.

    Raises:
        ShardingError: no mesh is in force; a wrong rank; more parts than elements; a device that is
            missing, repeated or unknown; elements that are no integers.
    """
    mesh = mesh_in_force("shard", tensor)
    what = f"shard({name_of(tensor)}, device_assignment"
    try:
        devices = np.asarray(device_assignment)
    except ValueError:
        raise ShardingError(
            f"{what}={device_assignment}): the rows are not of one length, so this is no array"
        ) from None
    what = f"{what} of shape {list(devices.shape)})"
    shape = static_shape(tensor, what)
    if not np.issubdtype(devices.dtype, np.integer):
        raise ShardingError(f"{what}: holds {devices.dtype}, but device numbers are integers")
    if devices.ndim not in (len(shape), len(shape) + 1):
        raise ShardingError(
            f"{what}: the tensor has {len(shape)} dimensions, shape {shape}; the assignment needs as "
            f"many, or one more, whose entries hold copies of a part"
        )
    _check_devices(what, devices.flatten().tolist(), mesh)
    if devices.ndim == len(shape):
        devices = devices[..., np.newaxis]
    for dim, (size, parts) in enumerate(zip(shape, devices.shape)):
        if size is not None and size < parts:
            raise ShardingError(
                f"{what}: dimension {dim} of shape {shape} has {size} elements, fewer than {parts} partitions"
            )
    return tile(tensor, devices, mesh)


def mesh_split(tensor: tf.Tensor, mesh: Mesh | str, mapping: DimsMapping) -> tf.Tensor:
    """Shards each dimension along the mesh axes that `mapping` names.

    The tensor is replicated along axes that the mapping does not name (partial tiling).

    Args:
        tensor: of rank R.
        mesh: a mesh over the devices of the mesh in force, or its text, e.g. 'data:2,model:4'; it may arrange them
            differently.
        mapping: R entries: an axis name, a tuple of them (major first), or None for a dimension
            that is not sharded.

    Raises:
        ShardingError: no mesh is in force; meshes of different sizes; a wrong rank; an unknown or
            repeated axis; more partitions than elements.
    """
    mesh_in_force("mesh_split", tensor)
    what = f"mesh_split({name_of(tensor)}, {mesh}, {mapping})"
    mesh = mesh_of(what, Mesh.parse(mesh, f"{what}: the mesh"))
    mapping = within_slice(mapping)
    check_mapping(what, static_shape(tensor, what), mapping, mesh)
    if mesh.size == 1:
        return tensor
    return tile(tensor, tile_devices(tuple(mapping), mesh), mesh)


def within_slice(mapping: DimsMapping, slices: Sequence[Slice] | None = None) -> DimsMapping:
    """The mapping without the axes of which one slice is traced: a slice is not sharded along them.

    Args:
        slices: those that are meant; None: those that are being traced.
    """
    gone = [one.axis for one in (traced_slices() if slices is None else slices)]
    if not gone or not isinstance(mapping, (tuple, list)):
        return mapping
    return tuple(axis_of([a for a in axes_of(axes) if a not in gone]) for axes in mapping)


def shard_letters(tensor: tf.Tensor, letters: str, split_map: SplitMap) -> tf.Tensor:
    """`mesh_split` on the mesh in force, by einsum letters (see `letters.dims_mapping`).

    On a mesh of one device it returns the tensor unchanged, and under `free_letters` where no letter has an axis.

    Raises:
        ShardingError: as `mesh_split`.
    """
    mesh = mesh_in_force("shard_letters", tensor)
    if mesh.size == 1:
        return tensor
    mapping = dims_mapping(letters, split_map)
    if _letters_are_free.get() and not any(mapping):
        return tensor
    return mesh_split(tensor, mesh, mapping)


def free_letters() -> contextlib.AbstractContextManager[bool]:
    """Inside, layers leave a tensor open none of whose letters has an axis; outside, they replicate it."""
    return holding(_letters_are_free, True)


_letters_are_free: contextvars.ContextVar[bool] = contextvars.ContextVar("free", default=False)


def sharded(tensor: tf.Tensor, mapping: DimsMapping) -> tf.Tensor:
    """`mesh_split` on the mesh in force; where no dimension is sharded, or without a mesh, XLA decides."""
    mesh = current_mesh()
    if mesh is None or mesh.size == 1 or not any(mapping):
        return tensor
    return mesh_split(tensor, mesh, mapping)


def mesh_in_force(what: str, tensor: tf.Tensor) -> Mesh:
    """The mesh that an annotation `what` of a tensor refers to.

    Raises:
        ShardingError: there is none.
    """
    return mesh_of(f"{what}({name_of(tensor)})", None)


def mesh_of(what: str, mesh: Mesh | str | None) -> Mesh:
    """The mesh for an operation: the given one, or else the one in force.

    Args:
        mesh: also as text; None for the one in force.

    Raises:
        ShardingError: no mesh is in force, it has another number of devices, or `mesh` is none.
    """
    ambient = current_mesh()
    if ambient is None:
        raise ShardingError(
            f"{what}: no mesh is in force, so this annotation could not take effect. Lower the function "
            "with an engine, or trace it under sharding.use_mesh(mesh)"
        )
    if mesh is None:
        return ambient
    mesh = Mesh.parse(mesh, f"{what}: the mesh")
    if mesh.size != ambient.size:
        raise ShardingError(
            f"{what}: {mesh.size} devices, but the mesh in force, {ambient}, has {ambient.size}"
        )
    return mesh


def tile(tensor: tf.Tensor, devices: np.ndarray, mesh: Mesh) -> tf.Tensor:
    """Annotates with tiles; the last dimension of `devices` counts the copies of each part."""
    if mesh.size == 1:
        return tensor
    return _apply(tile_sharding(devices), tensor)


def read_mapping(op: tf.Operation, mesh: Mesh) -> DimsMapping | None:
    """The mapping that an annotation's operation says; None where no axes of the mesh say it.

    Args:
        op: an XlaSharding operation, whose tensor is of known rank.
    """
    devices = read_tiles(op.get_attr("sharding"), op.outputs[0].shape.rank, mesh)
    return None if devices is None else read_tile_devices(devices, mesh)


def read_tiles(sharding: bytes, rank: int, mesh: Mesh) -> np.ndarray | None:
    """The devices of a serialised sharding, as `tile` takes them; None where it is of another kind.

    Args:
        sharding: XLA's OpSharding.
        mesh: whose devices hold it if it is replicated.
    """
    proto = xla_data_pb2.OpSharding.FromString(sharding)
    if proto.type == xla_data_pb2.OpSharding.REPLICATED:
        return mesh.device_array().reshape([1] * rank + [-1])
    if proto.type != xla_data_pb2.OpSharding.OTHER:
        return None
    devices = np.array(proto.tile_assignment_devices)
    devices = devices.reshape(list(proto.tile_assignment_dimensions))
    return devices if proto.replicate_on_last_tile_dim else devices[..., np.newaxis]


def tile_sharding(devices: np.ndarray) -> xla_sharding.Sharding:
    """XLA's sharding for an array of devices, whose last dimension counts the copies of each part."""
    copies = devices.shape[-1]
    if copies == devices.size:
        return xla_sharding.Sharding.replicate()
    if copies == 1:
        return xla_sharding.Sharding.tile(devices[..., 0])
    return xla_sharding.Sharding.partial_tile(devices)


def _apply(sharding: xla_sharding.Sharding, tensor: tf.Tensor) -> tf.Tensor:
    # Only the sharding *operation* survives lowering; the attribute, the default, would be lost silently.
    return sharding.apply_to_tensor(tensor, use_sharding_op=True)


def _check_dimension(what: str, dimension: int, shape: list[int | None]) -> None:
    if not isinstance(dimension, (int, np.integer)) or isinstance(dimension, bool):
        raise ShardingError(f"{what}: a dimension is an integer, one of 0..{len(shape) - 1}")
    if 0 <= dimension < len(shape):
        return
    text = (
        f"{what}: shape {shape} has dimensions 0..{len(shape) - 1}"
        if shape
        else (f"{what}: a scalar has no dimensions")
    )
    if -len(shape) <= dimension < 0:
        text += f"; they are counted from the front, so say {len(shape) + dimension}"
    raise ShardingError(text)


def _check_devices(what: str, devices: list[int], mesh: Mesh) -> None:
    """Raises unless `devices` holds every device of the mesh exactly once; the message says which not."""
    expected = set(range(mesh.size))
    problems = {
        "unknown": sorted(set(devices) - expected),
        "twice": sorted({d for d in devices if d in expected and devices.count(d) > 1}),
        "missing": sorted(expected - set(devices)),
    }
    faults = "; ".join(f"{kind}: {wrong}" for kind, wrong in problems.items() if wrong)
    if faults:
        raise ShardingError(
            f"{what}: holds devices {devices}, expected each of 0..{mesh.size - 1} once ({faults})"
        )


def static_shape(tensor: tf.Tensor, what: str) -> list[int | None]:
    """The tensor's shape, with None for an unknown size. Raises ShardingError if the rank is unknown."""
    shape = tf.TensorShape(np.shape(tensor) if not hasattr(tensor, "shape") else tensor.shape)
    if shape.rank is None:
        raise ShardingError(f"{what}: the tensor's rank is not known")
    return shape.as_list()


def name_of(tensor: tf.Tensor) -> str:
    """The tensor's name for messages, before it was annotated, or its shape if it has no name."""
    # An eager tensor has no name, not even where a graph uses it.
    name = getattr(tensor, "name", None) if isinstance(tensor, tf.Tensor) else None
    if name is None:
        return f"tensor of shape {list(getattr(tensor, 'shape', ()))}"
    return str(origin(tensor, ("XlaSharding",)).name)
