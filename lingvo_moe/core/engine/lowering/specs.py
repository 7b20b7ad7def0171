"""TensorSpec: name, shape, type and sharding of a tensor in a program or a checkpoint.

Imports neither TensorFlow nor JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from lingvo_moe.core.nested_map import first_difference, flatten_items, pack, skeleton
from lingvo_moe.core.sharding import Axis, DimsMapping, Mesh, ShardingError, check_mapping
from lingvo_moe.core.sharding.letters import DEVICE, split_over_copies


class SpecError(ValueError):
    """Tensors that do not match a spec or a structure."""


class Auto:
    """The type of AUTO."""


# For `results` of a Step: the partitioner chooses the shardings of results.
AUTO = Auto()


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that has not been allocated. A VariableSpec serves wherever one is asked for."""

    shape: tuple[int, ...]  # static
    dtype: str  # NumPy's name, e.g. 'float32', 'bfloat16', 'int32'
    # The mesh axis, axes or None of each dimension; () means replicated, None (results only) means that the
    # partitioner chooses.
    split: DimsMapping | None = ()
    name: str = ""  # dotted path; filled in from the structure where it is empty
    # The dimensions that OnMesh also shards along axes which `split` leaves out.
    free_dims: tuple[int, ...] = ()
    memory: str = DEVICE  # DEVICE or HOST, where the tensor is between two runs of the program

    @classmethod
    def Of(cls, spec: Any, name: str) -> "TensorSpec":
        """The spec of anything with shape, dtype and (maybe) split: a VariableSpec, an array, another TensorSpec."""
        split = getattr(spec, "split", ())
        return cls(
            tuple(int(n) for n in spec.shape),
            dtype_name(spec.dtype),
            None if split is None else tuple(split),
            name,
            getattr(spec, "free_dims", ()),
            getattr(spec, "memory", DEVICE),
        )

    def OnMesh(self, mesh: Mesh) -> "TensorSpec":
        """This spec with one entry of `split` for each dimension, checked against a mesh.

        Raises ShardingError: an axis that the mesh lacks, or a dimension that does not divide evenly over its
        partitions (arguments and results of a program are split evenly; inside a program XLA pads).
        """
        if self.split is None:
            return self
        whole: DimsMapping = (None,) * len(self.shape)
        if mesh.size == 1 or not (self.split or self.free_dims):
            return replace(self, split=whole, free_dims=())
        check_mapping(self.name, self.shape, self.split or whole, mesh)
        split = split_over_copies(self.shape, self.split or whole, self.free_dims, mesh)
        for dim, (size, axis) in enumerate(zip(self.shape, split, strict=True)):
            if axis is not None and size % mesh.axis_size(axis):
                raise ShardingError(
                    f"{self.name}: dimension {dim} of shape {list(self.shape)} has {size} elements,"
                    f" not a multiple of the {mesh.axis_size(axis)} partitions of axis {axis!r} of"
                    f" mesh {mesh}; pad it, or do not shard it"
                )
        return replace(self, split=split, free_dims=())

    def Check(self, shape: Sequence[int], dtype: Any) -> None:
        """Raises SpecError if a tensor of this shape and dtype does not match the spec."""
        if tuple(shape) != self.shape or dtype_name(dtype) != dtype_name(self.dtype):
            raise SpecError(
                f"{self.name} has to be {self.dtype}{list(self.shape)}, "
                f"got {dtype_name(dtype)}{list(shape)}"
            )

    def ToNumpy(self, value: Any) -> np.ndarray:
        """A host's value as an array of this spec. Python numbers are converted, arrays never.

        Raises SpecError: another shape or dtype.
        """
        if isinstance(value, (bool, int, float)):
            value = np.asarray(value, numpy_dtype(self.dtype))
        value = np.asarray(value)
        self.Check(value.shape, value.dtype)
        return value

    def NumBytes(self) -> int:
        """Bytes of the full tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def ToJson(self) -> dict[str, Any]:
        """A plain dict."""
        split = (
            None
            if self.split is None
            else [list(a) if isinstance(a, tuple) else a for a in self.split]
        )
        about = {"name": self.name, "shape": self.shape, "dtype": self.dtype, "split": split}
        return about if self.memory == DEVICE else about | {"memory": self.memory}

    @classmethod
    def FromJson(cls, value: Mapping[str, Any]) -> "TensorSpec":
        """The inverse of ToJson."""
        split = value["split"]
        if split is not None:
            axes: list[Axis] = [tuple(a) if isinstance(a, list) else a for a in split]
            split = tuple(axes)
        memory = value.get("memory", DEVICE)
        return cls(tuple(value["shape"]), value["dtype"], split, value["name"], memory=memory)


def dtype_name(dtype: Any) -> str:
    """NumPy's name of a dtype given by name, as a NumPy or a TensorFlow dtype."""
    if isinstance(dtype, str):
        return numpy_dtype(dtype).name
    return np.dtype(getattr(dtype, "as_numpy_dtype", dtype)).name


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name, including bfloat16 and other types of ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(ml_dtypes, name))


def map_with_specs(fn: Callable[[Any, TensorSpec], Any], tree: Any, specs: Any) -> Any:
    """`fn(leaf, its spec)` for the leaves of a tree; specs are named by their paths.

    Raises SpecError: the specs have another structure, naming the first leaf that differs.
    """
    items, spec_items = flatten_items(tree), flatten_items(specs)
    paths, wanted = [path for path, _ in items], [path for path, _ in spec_items]
    if paths != wanted:
        raise SpecError(first_difference(wanted, paths))
    leaves = [
        fn(value, TensorSpec.Of(spec, path)) for (path, value), (_, spec) in zip(items, spec_items)
    ]
    return pack(skeleton(tree), leaves)
