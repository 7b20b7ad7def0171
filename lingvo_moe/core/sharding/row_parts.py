"""Sums over a batch whose rows are spread over devices, inside a manual region.

Outside of regions the partitioner adds the devices' sums. Inside, a layer such as BatchNorm sees its device's rows
only, and asks here for the sum over all of them.
"""

import contextlib
import contextvars

import tensorflow as tf

from lingvo_moe.core.sharding.manual import all_reduce
from lingvo_moe.core.sharding.mesh import Mesh, holding, use_mesh

_spread: contextvars.ContextVar[tuple[Mesh, tuple[str, ...]] | None] = contextvars.ContextVar(
    "spread", default=None
)


def rows_spread_over(mesh: Mesh, axes: tuple[str, ...]) -> contextlib.AbstractContextManager:
    """Says that the rows of the batch are spread over these axes of a mesh, while a region over all axes is traced."""
    return holding(_spread, (mesh, axes))


def num_row_parts() -> int:
    """The number of devices over which the rows of a local batch are spread; 1 outside of `rows_spread_over`."""
    spread = _spread.get()
    return 1 if spread is None else spread[0].axis_size(spread[1])


def sum_over_row_parts(local: tf.Tensor) -> tf.Tensor:
    """The sum of a tensor over the devices that have other rows; the tensor itself outside of `rows_spread_over`."""
    spread = _spread.get()
    if spread is None or num_row_parts() == 1:
        return local
    mesh, axes = spread
    with use_mesh(mesh):
        return all_reduce(local, axes, mesh)
