"""The shardings of a Signature, as JAX has them."""

from typing import Any

import jax

from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import HOST


def named_sharding(spec: TensorSpec, mesh: Mesh, jax_mesh: Any) -> Any:
    """The `jax.sharding.NamedSharding` of a spec; None where its split is None.

    `mesh` is the one that the spec's split speaks of, `jax_mesh` the devices in its shape.
    """
    split = spec.OnMesh(mesh).split
    if split is None:
        return None
    parts = jax.sharding.PartitionSpec(*split)
    return jax.sharding.NamedSharding(jax_mesh, parts, memory_kind=memory_kind(spec))


def memory_kind(spec: TensorSpec) -> str | None:
    """JAX's name of the memory that a tensor is in; None: the device's own."""
    return "pinned_host" if spec.memory == HOST else None
