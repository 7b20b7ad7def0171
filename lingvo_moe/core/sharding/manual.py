"""Manual regions: parts of a program that are written for one device's part of each tensor.

(GShard paper, section 3.2, "mixing manual and automatic sharding".) Outside a region tensors have their
full shapes and the partitioner shards them. Inside, tensors are *local*: a tensor is one device's part,
with that part's shape, and operations run on it without partitioning or communication. Use a region
if you know more than the operations express, e.g. that a gather never leaves its device's rows.

    def rows(x, indices):                          # [B/8, T, M], [B/8, K] on each device
        return tf.gather(x, indices, batch_dims=1)

    y = manual_region(rows, [("d", None, None), ("d", None)], ("d", None, None))(x, indices)

Along mesh axes that a mapping does not name, devices hold copies. Gradients are those of the
equivalent function of full tensors: the gradient of a tensor that enters as copies is the sum over the
copies; a tensor that leaves as copies counts once.

A local tensor among a program's results, or one combined with a full tensor, would crash the
partitioner; `manual_check` finds it while the function is traced.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.private.tensorflow import gen_xla_ops
from lingvo_moe.core.sharding.annotate import (
    mesh_of,
    mesh_split,
    name_of,
    static_shape,
    tile_sharding,
    within_slice,
)
from lingvo_moe.core.sharding.letters import Axis, DimsMapping, axes_of, check_mapping, tile_devices
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError, traced_slices, use_mesh


def manual_region(
    fn: Callable[..., Any],
    in_mappings: Sequence[DimsMapping],
    out_mappings: Any,
    mesh: Mesh | str | None = None,
    axis: str | None = None,
) -> Callable[..., Any]:
    """Turns a function of local tensors into a function of full ones: opens a region, calls it, closes it.

    Args:
        fn: takes local tensors, one for each of `in_mappings`; returns a local tensor, or a tuple of
            them. It must get all tensors that it uses as arguments, but may make constants. `mesh`
            is in force while it runs.
        in_mappings: for each argument the mesh axis, axes or None of each dimension.
        out_mappings: one mapping if `fn` returns a tensor, a list or tuple of mappings if it returns
            a tuple or list.
        mesh: the mesh of the mappings; by default the one in force.
        axis: as in `auto_to_manual`.

    Returns:
        A function of full tensors that returns a full tensor or a tuple of them.

    Raises:
        ShardingError: (when called) as `auto_to_manual` and `manual_to_auto`; or the numbers of
            arguments or results differ from those of mappings.
    """

    def region(*tensors: tf.Tensor) -> Any:
        region_mesh = mesh_of("manual_region", mesh)
        if len(tensors) != len(in_mappings):
            raise ShardingError(
                f"manual_region: {len(tensors)} tensors for {len(in_mappings)} in_mappings "
                f"{in_mappings}, which is a list with one mapping for each tensor"
            )
        if traced_slices():
            if axis is not None:
                raise ShardingError(
                    f"manual_region: a function that is mapped over axis {traced_slices()[-1].axis!r} (core/sharding/"
                    f"vectorized.py) cannot have a region of axis {axis!r} alone; use one of all axes"
                )
            return _of_each_slice(fn, in_mappings, out_mappings, region_mesh, tensors)
        local = [
            auto_to_manual(t, mapping, region_mesh, axis)
            for t, mapping in zip(tensors, in_mappings, strict=True)
        ]
        with use_mesh(region_mesh):
            results = fn(*local)
        single = not isinstance(results, (tuple, list))
        outs = [out_mappings] if single else _mappings(out_mappings, len(results))
        full = [
            manual_to_auto(_tensor(t), mapping, None, region_mesh, axis)
            for t, mapping in zip([results] if single else results, outs, strict=True)
        ]
        return full[0] if single else tuple(full)

    return region


def _of_each_slice(
    fn: Callable[..., Any],
    in_mappings: Sequence[DimsMapping],
    out_mappings: Any,
    mesh: Mesh,
    tensors: Sequence[tf.Tensor],
) -> Any:
    """The region within a function that is vectorized over a mesh axis: see core/sharding/vectorized.py."""
    single = False
    slices = traced_slices()

    def plain(*one: tf.Tensor) -> Sequence[tf.Tensor]:
        nonlocal single
        with use_mesh(Mesh(mesh.axis_names, (1,) * len(mesh.shape))):
            results = fn(*one)
        single = not isinstance(results, (tuple, list))
        return [results] if single else list(results)

    def mapped(over: str) -> Callable[..., Sequence[tf.Tensor]]:
        def each(*local: tf.Tensor) -> list[tf.Tensor]:
            slices = [fn(*one) for one in zip(*map(tf.unstack, local), strict=True)]
            if single:
                return [tf.stack(slices)]
            return [tf.stack(results) for results in zip(*slices, strict=True)]

        if mesh.size == 1:
            return each
        outs = [out_mappings] if single else out_mappings
        ins, outs = (
            [(over, *within_slice(mapping, slices)) for mapping in mappings]
            for mappings in (in_mappings, outs)
        )
        region = manual_region(each, ins, outs, mesh)
        return lambda *stacked: list(region(*stacked))

    results = slices[-1].call(plain, mapped, tensors)
    return results[0] if single else tuple(results)


def auto_to_manual(
    tensor: tf.Tensor, mapping: DimsMapping, mesh: Mesh | str | None = None, axis: str | None = None
) -> tf.Tensor:
    """The paper's auto_to_manual_spmd_partition: opens a region, from a full tensor to each device's part.

    Args:
        tensor: of full shape.
        mapping: for each dimension the mesh axis, axes or None; dimensions divide evenly.
        axis: opens a region that is manual along this mesh axis only; along the others the
            partitioner shards the tensor as the mapping says.

    Returns:
        The local tensor: each dimension divided by the number of its parts.

    Raises:
        ShardingError: no mesh is in force; a mapping that does not fit the tensor; a dimension of
            unknown size, or one that does not divide evenly; a dimension that is mapped to `axis`
            and others.
    """
    what = f"auto_to_manual({name_of(tensor)}, {mapping})"
    mesh = mesh_of(what, mesh)
    shape = static_shape(tensor, what)
    mapping = _checked(what, mapping, shape, mesh)
    if mesh.size == 1:
        return tensor
    _parts(what, shape, mapping, mesh, divide=True)
    if axis is not None and _size(what, axis, mesh) == 1:
        return mesh_split(tensor, mesh, mapping)
    if axis is not None:
        return _enter_axis(what, tensor, mapping, mesh, axis)
    return _enter(tensor, mapping, mesh)


def manual_to_auto(
    tensor: tf.Tensor,
    mapping: DimsMapping,
    full_shape: Sequence[int] | None = None,
    mesh: Mesh | str | None = None,
    axis: str | None = None,
) -> tf.Tensor:
    """The paper's manual_to_auto_spmd_partition: closes a region, from local tensors to the full one.

    Args:
        tensor: local.
        mapping: the sharding of the full tensor. Along axes that it does not name, the devices' local
            tensors have to be equal; if they are not, it is undefined which of them counts.
        full_shape: the expected full shape, to be checked; it follows from local shape and mapping.
        axis: the axis of the region, if it has one; then the mapping has to name it.

    Raises:
        ShardingError: as `auto_to_manual`; or `full_shape` differs.
    """
    what = f"manual_to_auto({name_of(tensor)}, {mapping})"
    mesh = mesh_of(what, mesh)
    local = static_shape(tensor, what)
    mapping = _checked(what, mapping, [None] * len(local), mesh)
    if mesh.size == 1:
        return tensor
    inside = mapping if axis is None else _only(what, mapping, mesh, axis)
    full = [
        None if n is None else n * p
        for n, p in zip(local, _parts(what, local, inside, mesh), strict=True)
    ]
    if full_shape is not None and list(full_shape) != full:
        raise ShardingError(
            f"{what}: local shape {local} makes a full shape of {full}, not {list(full_shape)}"
        )
    if None in full:
        raise ShardingError(f"{what}: local shape {local} is not entirely known")
    if axis is None:
        return _leave(tensor, mapping, full, mesh)
    if _size(what, axis, mesh) == 1:
        return mesh_split(tensor, mesh, mapping)
    if inside.count(axis) != 1:
        raise ShardingError(
            f"{what}: a region of axis {axis!r} alone cannot give back copies along it; name the axis "
            "in the mapping, or add the local tensors up by all_reduce outside"
        )
    return gen_xla_ops.xla_spmd_shard_to_full_shape(
        tensor, _proto(mesh, mapping), full, dim=inside.index(axis), name="manual_to_auto"
    )


def device_index(axis: str, mesh: Mesh | str | None = None) -> tf.Tensor:
    """Inside a region over all axes: the device's position along a mesh axis, a local int32 scalar.

    Raises:
        ShardingError: no mesh is in force, or it has no such axis.
    """
    what = f"device_index({axis!r})"
    mesh = mesh_of(what, mesh)
    size = _size(what, axis, mesh)
    return tf.reshape(auto_to_manual(tf.range(size), (axis,), mesh), [])


def all_reduce(tensor: tf.Tensor, axis: Axis, mesh: Mesh | str | None = None) -> tf.Tensor:
    """Inside a region over all axes: the sum of the local tensors along a mesh axis (or several).

    Every device along the axis gets the sum. The implementation leaves the region, with each device's
    tensor as a slice of a full one, sums over the slices (one all-reduce), and enters again.

    Args:
        tensor: local, of one shape on all devices.
        axis: a mesh axis or a tuple of them.

    Raises:
        ShardingError: no mesh is in force, or it has no such axis.
    """
    what = f"all_reduce({name_of(tensor)}, {axis!r})"
    mesh = mesh_of(what, mesh)
    if _size(what, axis, mesh) == 1:
        return tensor
    axes = axes_of(axis)
    rest = (None,) * tensor.shape.rank
    others = tuple(a for a in mesh.axis_names if a not in axes) or None
    slices = manual_to_auto(tensor[tf.newaxis, tf.newaxis], (axes, others, *rest), None, mesh)
    local = auto_to_manual(tf.reduce_sum(slices, 0), (others, *rest), mesh)
    return tf.reshape(local, tensor.shape)


def rotate(tensor: tf.Tensor, axis: str, mesh: Mesh | str | None = None, by: int = 1) -> tf.Tensor:
    """Inside a region over all axes: the local tensor of the device `by` positions further along an axis.

    Of n devices along the axis, the one at position i gets the tensor of position (i + by) % n, and so sends its own to
    (i - by) % n: with by=1 the device at 0 has that of 1, and after t calls that of t % n. It is one
    collective-permute: the implementation leaves the region and enters it again with the devices in another order.

    Args:
        tensor: local, of one shape on all devices.
        by: 1 for the next device, -1 for the one before.

    Raises:
        ShardingError: no mesh is in force, or it has no such axis.
    """
    what = f"rotate({name_of(tensor)}, {axis!r})"
    mesh = mesh_of(what, mesh)
    if not isinstance(axis, str):
        raise ShardingError(f"{what}: axis must be the name of one mesh axis")
    if _size(what, axis, mesh) == 1:
        return tensor
    devices = np.roll(mesh.device_array(), by, mesh.axis_names.index(axis))
    turned = Mesh(mesh.axis_names, mesh.shape, tuple(devices.flatten().tolist()))
    mapping = (*mesh.axis_names, *(None,) * tensor.shape.rank)
    full = manual_to_auto(tensor[(tf.newaxis,) * len(mesh.shape)], mapping, None, mesh)
    return tf.reshape(auto_to_manual(full, mapping, turned), tensor.shape)


def _enter(tensor: tf.Tensor, mapping: DimsMapping, mesh: Mesh) -> tf.Tensor:
    copies = _unnamed(mapping, mesh)

    @private.custom_gradient
    def enter(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        annotated = mesh_split(x, mesh, mapping)
        local = gen_xla_ops.xla_spmd_full_to_shard_shape(
            annotated, _proto(mesh, mapping), name="auto_to_manual"
        )

        def grad(dlocal: tf.Tensor) -> tf.Tensor:
            if not copies:
                return _leave(dlocal, mapping, x.shape.as_list(), mesh)
            # Each copy has its own gradient. The operator's registered gradient takes one of them;
            # correct is their sum.
            gradients = _leave(
                dlocal[tf.newaxis], (copies, *mapping), [-1, *x.shape.as_list()], mesh
            )
            return mesh_split(tf.reduce_sum(gradients, 0), mesh, mapping)

        return local, grad

    return enter(tensor)


def _leave(
    tensor: tf.Tensor, mapping: DimsMapping, full_shape: Sequence[int | None], mesh: Mesh
) -> tf.Tensor:
    copies = math.prod(mesh.axis_size(a) for a in _unnamed(mapping, mesh))
    full = [mesh.axis_size(a or ()) if n == -1 else n for n, a in zip(full_shape, mapping)]

    @private.custom_gradient
    def leave(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        y = gen_xla_ops.xla_spmd_shard_to_full_shape(
            x, _proto(mesh, mapping), full, name="manual_to_auto"
        )

        def grad(dy: tf.Tensor) -> tf.Tensor:
            # The copies are one tensor, so each gets an equal share of its gradient.
            dx = _enter(dy, mapping, mesh)
            return dx if copies == 1 else dx * tf.constant(1.0 / copies, dx.dtype)

        return y, grad

    return leave(tensor)


def _enter_axis(
    what: str, tensor: tf.Tensor, mapping: DimsMapping, mesh: Mesh, axis: str
) -> tf.Tensor:
    """Opens a region of one axis; XLA's registered gradient is right if that axis shards a dimension."""
    inside = _only(what, mapping, mesh, axis)
    if axis in inside:
        annotated = mesh_split(tensor, mesh, mapping)
        return gen_xla_ops.xla_spmd_full_to_shard_shape(
            annotated, _proto(mesh, mapping), dim=inside.index(axis), name="auto_to_manual"
        )
    # Copies: a new dimension of them, whose gradient is the sum.
    copies = tf.broadcast_to(tensor, [mesh.axis_size(axis), *tensor.shape])
    return _enter_axis(what, copies, (axis, *mapping), mesh, axis)[0]


def _only(what: str, mapping: DimsMapping, mesh: Mesh, axis: str) -> DimsMapping:
    """The mapping without all axes except one."""
    _size(what, axis, mesh)
    for dim, axes in enumerate(mapping):
        if isinstance(axes, tuple) and len(axes) > 1 and axis in axes:
            raise ShardingError(
                f"{what}: dimension {dim} is sharded along {axes}, but in a region of axis {axis!r} alone "
                "that axis must be the only one of its dimension"
            )
    return tuple(axis if a in (axis, (axis,)) else None for a in mapping)


def _parts(
    what: str,
    shape: Sequence[int | None],
    mapping: DimsMapping,
    mesh: Mesh,
    divide: bool = False,
) -> list[int]:
    parts = [mesh.axis_size(axes or ()) for axes in mapping]
    for dim, (size, n) in enumerate(zip(shape, parts, strict=True)):
        if n > 1 and size is None:
            raise ShardingError(
                f"{what}: dimension {dim} of shape {list(shape)} has no static size"
            )
        if divide and size is not None and size % n:
            raise ShardingError(
                f"{what}: dimension {dim} of shape {list(shape)} has {size} elements, not a multiple of "
                f"the {n} partitions of axis {mapping[dim]!r} of mesh {mesh}; in a manual region every "
                "device has a part of the same size, pad the tensor first"
            )
    return parts


def _unnamed(mapping: DimsMapping, mesh: Mesh) -> tuple[str, ...]:
    """The axes that hold copies and have more than one device."""
    named = {a for axes in mapping for a in axes_of(axes)}
    return tuple(a for a, n in zip(mesh.axis_names, mesh.shape) if a not in named and n > 1)


def _tensor(result: Any) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(result)
    except (TypeError, ValueError):
        raise ShardingError(
            f"manual_region: the function returns a {type(result).__name__}; expected a tensor or a tuple "
            "of tensors"
        ) from None


def _mappings(out_mappings: Any, count: int) -> Sequence[DimsMapping]:
    """Checks that there is one mapping for each of several results, and returns them."""
    mappings = out_mappings if isinstance(out_mappings, (tuple, list)) else ()
    if not mappings or not all(isinstance(m, (tuple, list)) for m in mappings):
        raise ShardingError(
            f"manual_region: the function returns {count} results, but out_mappings is one mapping, "
            f"{out_mappings!r}; give a list of {count}"
        )
    if len(mappings) != count:
        raise ShardingError(f"manual_region: {count} results for {len(mappings)} out_mappings")
    return mappings


def _proto(mesh: Mesh, mapping: DimsMapping) -> bytes:
    """XLA's serialised sharding for the mapping."""
    return tile_sharding(tile_devices(mapping, mesh)).proto.SerializeToString()


def _checked(
    what: str, mapping: DimsMapping, shape: Sequence[int | None], mesh: Mesh
) -> DimsMapping:
    """Checks the mapping and turns its lists into tuples.

    Raises:
        ShardingError: it does not fit the shape or the mesh.
    """
    check_mapping(what, shape, mapping, mesh)
    return tuple(tuple(a) if isinstance(a, list) else a for a in mapping)


def _size(what: str, axis: Axis, mesh: Mesh) -> int:
    """The number of devices along a mesh axis or several; raises ShardingError for an unknown axis."""
    names: Any = axis if isinstance(axis, (tuple, list)) else (axis,)
    check_mapping(what, [None], (tuple(names),), mesh)
    return mesh.axis_size(names)
