"""Maps einsum letters to mesh axes, so that mathematics and sharding share one vocabulary.

A split map gives the mesh axis of each letter, e.g. {'G': 'expert', 'B': 'expert', 'E': 'expert'}. A
tensor uses each mesh axis once; if several of its letters map to it, the leftmost takes it. So GSEC is
sharded along G, EGCM along E and GECM along G: the partitioning of the paper's Algorithm 2. With
{'G': ('data', 'expert'), 'E': 'expert'} EGCM is sharded along E over 'expert' and along G over 'data'.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from lingvo_moe.core.config.checks import STATE_LEVELS, did_you_mean
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError

# The letters that split maps accept. The module of a layer with a new letter adds it: WEIGHT_LETTERS["F"] = "filters".
WEIGHT_LETTERS = {
    "A": "heads of keys and values, where queries have more",
    "E": "experts",
    "H": "hidden units",
    "I": "channels that a convolution reads",
    "K": "units of a head",
    "L": "layers of a stack",
    "M": "the model's width",
    "N": "heads",
    "O": "channels that a convolution makes",
    "R": "latent units of attention",
    "U": "tasks",
    "V": "vocabulary, or classes",
    "W": "buckets of distances",
    "X": "columns of an image or a kernel",
    "Y": "rows of an image or a kernel",
    "Z": "stages of a pipeline",
}
ACTIVATION_LETTERS = {
    **WEIGHT_LETTERS,
    "B": "rows of the batch",
    "C": "slots of an expert",
    "D": "groups of rows on one device",
    "G": "groups of tokens",
    "J": "hypotheses",
    "L": "positions in a cache",
    "P": "projections",
    "Q": "blocks of tokens in attention",
    "S": "source positions, or tokens of a group",
    "T": "target positions",
}
NONE, SLOTS, GRADIENTS, WEIGHTS = STATE_LEVELS
DEVICE, HOST = "device", "host"  # the memory that a tensor of the state is in
Axis = str | tuple[str, ...] | None
SplitMap = Mapping[str, Axis]
DimsMapping = tuple[Axis, ...]


def dims_mapping(letters: str, split_map: SplitMap, name: str = "") -> DimsMapping:
    """The mesh axis (or axes, or None) of each dimension of a tensor.

    Args:
        letters: one letter per dimension, e.g. 'EMH'.
        split_map: letter -> axis; the key 'name.letter' applies to one tensor only and takes
            precedence over the bare letter.
    """
    used: set[str] = set()
    out: list[Axis] = []
    for letter in letters:
        axis = split_map.get(f"{name}.{letter}", split_map.get(letter))
        axes = [a for a in axes_of(axis) if a not in used]
        used.update(axes)
        out.append(axis_of(axes))
    return tuple(out)


def shards(level: str, part: str) -> bool:
    """Whether a level of train.shard_state shards a part of the state: SLOTS, GRADIENTS or WEIGHTS.

    The levels are the stages of ZeRO (Rajbhandari et al. 2020, section 5):

    * slots: the optimizer's slots, and the moving average of the weights. Each device updates its part of a weight,
      from its part of the gradient; then the parts are gathered.
    * gradients: these too, as soon as those of a layer are known.
    * weights: these too. Those of a layer are gathered before they are used, in the backward pass once more.
    """
    return STATE_LEVELS.index(level) >= STATE_LEVELS.index(part)


def split_over_copies(
    shape: Sequence[int], split: DimsMapping, free_dims: Collection[int], mesh: Mesh
) -> DimsMapping:
    """A tensor's mapping with the axes added that it leaves out, along which devices would hold copies.

    All of them shard the first dimension that they divide together: parts of a leading dimension lie one behind the
    other in memory, so that gathering them moves nothing else. Dimensions that `split` leaves whole come before those
    that it shards: where a gradient is to be sharded further along a sharded dimension, as that of experts, XLA gathers
    the operands of its product. If no dimension divides, the larger axes come first, each for itself; an axis that
    divides no dimension still holds copies.
    """
    if mesh.size == 1 or not free_dims:
        return split
    axes = [axes_of(axis) for axis in split]
    local_sizes = [
        size // mesh.axis_size(dim_axes) for size, dim_axes in zip(shape, axes, strict=True)
    ]
    used = {a for dim_axes in axes for a in dim_axes}
    copies = tuple(a for a in mesh.axis_names if a not in used and mesh.axis_size(a) > 1)
    by_size = sorted(copies, key=lambda a: -mesh.axis_size(a))
    together = any(local_sizes[d] % mesh.axis_size(copies) == 0 for d in free_dims)
    order = sorted(free_dims, key=lambda d: (bool(axes[d]), d))
    for more in [copies] if together else [(axis,) for axis in by_size]:
        parts = mesh.axis_size(more)
        dim = next((d for d in order if local_sizes[d] % parts == 0), None)
        if dim is not None:
            axes[dim] += more
            local_sizes[dim] //= parts
    return tuple(map(axis_of, axes))


def part_shape(shape: Sequence[int], split: DimsMapping, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a device's part of a tensor, rounded up where a dimension does not divide."""
    return tuple(
        size if axis is None else -(-size // mesh.axis_size(axis))
        for size, axis in zip(shape, split, strict=True)
    )


def axis_of(axes: Sequence[str]) -> Axis:
    """Mesh axes, major first, as a mapping's entry: the inverse of `axes_of`."""
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def check_mapping(name: str, shape: Sequence[int | None], mapping: DimsMapping, mesh: Mesh) -> None:
    """Checks that a mapping fits a tensor.

    Args:
        shape: of the tensor; None for an unknown size.

    Raises:
        ShardingError: it does not fit; the message names tensor, dimension, size and partitions.
    """
    if not isinstance(mapping, (tuple, list)):
        raise ShardingError(
            f"{name}: {mapping!r} is no mapping, which has a mesh axis, a tuple of them or None for "
            f"each dimension of shape {list(shape)}"
        )
    if len(mapping) != len(shape):
        raise ShardingError(
            f"{name}: a mapping of {len(mapping)} dimensions {mapping} for a tensor of shape {list(shape)}"
        )
    seen: dict[str, int] = {}
    for dim, (size, axis) in enumerate(zip(shape, mapping, strict=True)):
        if axis is None:
            continue
        axes = axis if isinstance(axis, (tuple, list)) else (axis,)
        for a in axes:
            if not isinstance(a, str):
                raise ShardingError(
                    f"{name}: {a!r}, for dimension {dim}, is no mesh axis; mesh {mesh} has the axes "
                    f"{', '.join(mesh.axis_names)}"
                )
            if a not in mesh.axis_names:
                raise ShardingError(
                    f"{name}: mesh {mesh} has no axis {a!r}{did_you_mean(a, mesh.axis_names)}"
                )
            if a in seen:
                raise ShardingError(
                    f"{name}: mesh axis {a!r} shards both dimension {seen[a]} and dimension {dim}; use it once"
                )
            seen[a] = dim
        parts = mesh.axis_size(axes)
        if size is not None and size < parts:
            raise ShardingError(
                f"{name}: dimension {dim} of shape {list(shape)} has {size} elements, "
                f"fewer than the {parts} partitions of "
                f"axis {axis!r} of mesh {mesh}"
            )


def axes_of(axis: Axis) -> tuple[str, ...]:
    """A mapping's entry as a tuple of mesh axes, major first."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def parts_of(letter: str, mesh: Mesh, split_maps: Iterable[SplitMap | None]) -> int:
    """The least number that every partitioning of a letter's dimensions in these maps divides, from 1 on."""
    axes = [
        axis
        for split_map in split_maps
        for key, axis in (split_map or {}).items()
        if key.rpartition(".")[2] == letter
    ]
    return math.lcm(*(mesh.axis_size(axes_of(axis)) for axis in axes))


def tile_devices(mapping: DimsMapping, mesh: Mesh) -> np.ndarray:
    """Returns the devices that hold each part of a tensor of rank R.

    The result has rank R+1: the number of parts of each dimension, then the copies of a part.
    """
    per_dim = [axes_of(a) for a in mapping]
    order = [a for axes in per_dim for a in axes]
    order += [a for a in mesh.axis_names if a not in order]
    devices = mesh.device_array().transpose([mesh.axis_names.index(a) for a in order])
    return devices.reshape([*(mesh.axis_size(axes) for axes in per_dim), -1])


def read_tile_devices(devices: np.ndarray, mesh: Mesh) -> DimsMapping | None:
    """The mapping with these `tile_devices`, the copies of a part in any order; None where no axes have them."""
    tiles = devices.shape[:-1]
    if not np.array_equal(np.sort(devices, axis=None), np.arange(mesh.size)):
        return None
    part = np.empty(mesh.size, np.int64)
    part[devices.flatten()] = np.arange(mesh.size) // devices.shape[-1]
    axes = []
    for place in np.unravel_index(part[mesh.device_array()], tiles) if tiles else ():
        # By how much one step along each axis changes the number of the part.
        steps = {
            name: np.diff(place, axis=i).flat[0]
            for i, name in enumerate(mesh.axis_names)
            if mesh.shape[i] > 1
        }
        axes.append(sorted(filter(steps.get, steps), key=lambda name: -steps[name]))
    used = list(itertools.chain.from_iterable(axes))
    mapping = tuple(map(axis_of, axes))
    if len(set(used)) < len(used):
        return None
    same = np.array_equal(np.sort(tile_devices(mapping, mesh)), np.sort(devices))
    return mapping if same else None
