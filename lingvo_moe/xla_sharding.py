"""The annotation API under one name.

    from lingvo_moe import xla_sharding as xs

    mesh = xs.Mesh.parse("data:2,model:4")

    def layer(x, w):                                  # traced by an engine, or by xs.shard
        x = xs.mesh_split(x, mesh, ("data", None))
        return tf.nn.relu(x @ xs.mesh_split(w, mesh, (None, "model")))

    y = xs.shard(layer, mesh=mesh)(x, w)              # eager code

| call | meaning | paper |
| --- | --- | --- |
| `replicate`, `split`, `shard`, `mesh_split` | the sharding of a tensor | 3.2, A.3 |
| `redistribute` | from one sharding to another, by the cheapest collectives | |
| `auto_to_manual`, `manual_to_auto`, `manual_region` | code on one device's part of each tensor | 3.2 |
| `device_index`, `all_reduce`, `rotate` | inside such code: a device's position, sums, a neighbour's tensor | |
| `looped_einsum` | two large operands, neither of them gathered | 3.3.2, figure 4c |
| `shard(fn, ...)`, `shard_function` | a function called from eager code as one program | |
| `auto_shard(fn, mesh, ...)` | the same, whose sharding is searched for | |
| `explain`, `get_sharding` | the shardings and the communication of a program | |
| `verify` | whether a function over a mesh is what it is on one device | |

The engine is imported by the calls that need it, not by this module.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from lingvo_moe.core.sharding.annotate import mesh_split, replicate, shard as _shard_tensor, split
from lingvo_moe.core.sharding.looped_einsum import looped_einsum
from lingvo_moe.core.sharding.manual import (
    all_reduce,
    auto_to_manual,
    device_index,
    manual_region,
    manual_to_auto,
    rotate,
)
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError, current_mesh, use_mesh
from lingvo_moe.core.sharding.redistribution import plan_redistribution, redistribute

if TYPE_CHECKING:
    from lingvo_moe.core.partitioner.explanation import Explanation

__all__ = [
    "Mesh",
    "ShardingError",
    "all_reduce",
    "auto_shard",
    "auto_to_manual",
    "current_mesh",
    "device_index",
    "explain",
    "get_sharding",
    "looped_einsum",
    "manual_region",
    "manual_to_auto",
    "mesh_split",
    "plan_redistribution",
    "redistribute",
    "replicate",
    "rotate",
    "shard",
    "shard_function",
    "split",
    "use_mesh",
    "verify",
]


def shard(
    tensor_or_function: tf.Tensor | Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Shards a tensor, or turns a function into a sharded program.

    `shard(tensor, device_assignment)` gives the device of each part (appendix A.3;
    `core.sharding.annotate.shard`). `shard(fn, in_shardings, out_shardings, mesh)` is `shard_function`.

    Raises:
        ShardingError: as these two.
    """
    if callable(tensor_or_function):
        return shard_function(tensor_or_function, *args, **kwargs)
    return _shard_tensor(tensor_or_function, *args, **kwargs)


def shard_function(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """`core.engine.eager.functional.shard_function`: a function as one SPMD program, called from eager code."""
    from lingvo_moe.core.engine.eager.functional import shard_function

    return shard_function(fn, *args, **kwargs)


def auto_shard(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """`core.auto_shard.function.auto_shard`: a function as one SPMD program whose sharding is searched for."""
    from lingvo_moe.core.auto_shard.function import auto_shard

    return auto_shard(fn, *args, **kwargs)


def explain(program: Any, *args: Any, **kwargs: Any) -> "Explanation":
    """`explaining.explain`: shardings and communication of a program, with the source lines behind them."""
    from lingvo_moe.inspecting.explaining import explain

    return explain(program, *args, **kwargs)


def verify(fn: Callable[..., Any], mesh: Mesh, *args: Any, **kwargs: Any) -> None:
    """`verifying.verify`: raises where an annotated function over a mesh of virtual CPU devices, or a gradient
    of it, is not what it is on one device."""
    from lingvo_moe.inspecting.verifying import verify

    verify(fn, mesh, *args, **kwargs)


def get_sharding(program: Any, tensor_name: str) -> Any:
    """`explaining.get_sharding`: the sharding of a tensor after propagation."""
    from lingvo_moe.inspecting.explaining import get_sharding

    return get_sharding(program, tensor_name)
