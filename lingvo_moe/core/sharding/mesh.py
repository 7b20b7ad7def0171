"""Mesh: a logical arrangement of devices with named axes, and the current mesh while tracing.

Imports neither TensorFlow nor JAX: a saved program names its mesh, and loads without model code.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from lingvo_moe.core.config.checks import did_you_mean

_T = TypeVar("_T")


class ShardingError(ValueError):
    """An annotation or a mesh that cannot take effect."""


@dataclass(frozen=True)
class Mesh:
    """Devices in a grid with named axes."""

    axis_names: tuple[str, ...]  # a name for each axis
    shape: tuple[int, ...]  # the size of each axis
    # Logical device numbers in row-major order, a permutation of 0..size-1; () means in order.
    device_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis_names", tuple(self.axis_names))
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "device_ids", tuple(int(i) for i in self.device_ids))
        if not len(set(self.axis_names)) == len(self.axis_names) == len(self.shape):
            raise ShardingError(
                f"mesh: axis names {self.axis_names} do not name the axes of shape {self.shape}, once each"
            )
        if any(n < 1 for n in self.shape):
            raise ShardingError(f"mesh {self}: every axis needs at least one device")
        if self.device_ids and sorted(self.device_ids) != list(range(self.size)):
            raise ShardingError(
                f"mesh {self}: device_ids must hold each of 0..{self.size - 1} once, got {self.device_ids}"
            )

    @classmethod
    def parse(cls, text: "Mesh | str", what: str = "--mesh") -> "Mesh":
        """Parses `axis:size[,axis:size...]`, e.g. 'expert:8' or 'data:2,expert:4'. A Mesh is returned as it is.

        Args:
            what: the flag or parameter that it comes from, for messages.

        Raises:
            ShardingError: any other text, or another object.
        """
        if isinstance(text, Mesh):
            return text
        if not isinstance(text, str):
            raise ShardingError(
                f"{what} is a {type(text).__name__}; give a sharding.Mesh or its text, e.g. 'data:2,expert:4'"
            )
        names, sizes = [], []
        for part in text.split(","):
            name, colon, size = part.strip().partition(":")
            if not colon or not name.isidentifier() or not size.isdecimal():
                raise ShardingError(
                    f"{what}={text!r}: {part!r} is not of the form axis:size, e.g. 'expert:8' or 'data:2,expert:4'"
                )
            names.append(name)
            sizes.append(int(size))
        return cls(tuple(names), tuple(sizes))

    def __str__(self) -> str:
        return ",".join(
            f"{name}:{size}" for name, size in zip(self.axis_names, self.shape, strict=True)
        )

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    def axis_size(self, axis: "str | Sequence[str]") -> int:
        """The number of partitions along an axis, or along several together.

        Raises ShardingError: an axis that the mesh does not have.
        """
        if isinstance(axis, str):
            if axis not in self.axis_names:
                raise ShardingError(
                    f"mesh {self} has no axis {axis!r}{did_you_mean(axis, self.axis_names)}"
                )
            return self.shape[self.axis_names.index(axis)]
        return math.prod(self.axis_size(a) for a in axis)

    def over_devices(self, num_devices: int) -> "Mesh":
        """This mesh for another number of devices: the first axis changes, the others stay.

        On one device every axis has size 1.

        Raises:
            ShardingError: the other axes do not divide that number.
        """
        if num_devices == 1:
            return Mesh(self.axis_names, (1,) * len(self.shape))
        rest = math.prod(self.shape[1:])
        if num_devices % rest:
            raise ShardingError(
                f"mesh {self} cannot be laid over {num_devices} devices: its axes except the first "
                f"need a multiple of {rest} devices; or give --mesh"
            )
        return Mesh(self.axis_names, (num_devices // rest, *self.shape[1:]))

    def device_array(self) -> np.ndarray:
        """The logical device numbers in the mesh's shape."""
        return np.array(self.device_ids or range(self.size)).reshape(self.shape)


def single_device() -> Mesh:
    """The mesh of one device, on which annotations by letters have nothing to do."""
    return Mesh(("expert",), (1,))


_current: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar[_T], value: _T) -> Iterator[_T]:
    """Inside, a context variable, of what is in force while a function is traced, has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def use_mesh(mesh: Mesh | str) -> contextlib.AbstractContextManager[Mesh | None]:
    """Sets the mesh that annotations use while a function is traced. Engines call it; users seldom do."""
    return holding(_current, Mesh.parse(mesh, "use_mesh"))


def current_mesh() -> Mesh | None:
    """The mesh in force, or None."""
    return _current.get()


@dataclass(frozen=True)
class Slice:
    """The slices of tensors that one traced slice stands for: see core/sharding/vectorized.py."""

    axis: str  # the mesh axis along which the slices lie
    count: int  # how many there are
    call: Callable[..., Any]  # vectorized.as_one_operation


_slices: contextvars.ContextVar[tuple[Slice, ...]] = contextvars.ContextVar("slices", default=())


def tracing_slice(slice_: Slice) -> contextlib.AbstractContextManager[tuple[Slice, ...]]:
    """Says that what is traced is one slice, within the slice that is traced already, if there is one."""
    return holding(_slices, (*_slices.get(), slice_))


@contextlib.contextmanager
def tracing_all_slices() -> Iterator[Slice]:
    """The opposite of the innermost `tracing_slice`, for what takes all slices at once."""
    *outer, innermost = _slices.get()
    with holding(_slices, tuple(outer)):
        yield innermost


def traced_slices() -> tuple[Slice, ...]:
    """The slices that are being traced, the outermost first."""
    return _slices.get()
