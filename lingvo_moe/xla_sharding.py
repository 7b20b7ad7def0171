"""The annotation API under one name: all that a program's author needs to say how it is cut.

    from lingvo_moe import xla_sharding as xs

    mesh = xs.Mesh.parse("data:2,model:4")

    def layer(x, w):                                  # traced by an engine, or by xs.shard
        x = xs.mesh_split(x, mesh, ("data", None))
        return tf.nn.relu(x @ xs.mesh_split(w, mesh, (None, "model")))

    y = xs.shard(layer, mesh=mesh)(x, w)              # eager code

| call | meaning | paper |
| --- | --- | --- |
| `replicate`, `split`, `shard`, `mesh_split` | how a tensor is cut | 3.2, A.3 |
| `redistribute` | from one way of cutting to another, by the cheapest collectives | |
| `auto_to_manual`, `manual_to_auto`, `manual_region` | code for one device's share of each tensor | 3.2 |
| `device_index`, `all_reduce`, `rotate` | inside of such code: who one is, sums, a neighbour's tensor | |
| `looped_einsum` | two large operands, neither of them ever gathered | 3.3.2, figure 4c |
| `shard(fn, ...)`, `shard_function` | a function called from eager code as one program | |
| `explain`, `get_sharding` | what the partitioner made of a program | |

The engine is imported by the calls that need it, not by this module.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from lingvo_moe.core.sharding.annotate import mesh_split, replicate, split
from lingvo_moe.core.sharding.annotate import shard as _shard_tensor
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
]


def shard(
    tensor_or_function: tf.Tensor | Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Of a tensor: `shard(tensor, device_assignment)` says which device holds which part (appendix A.3;
    `core.sharding.annotate.shard`). Of a function: `shard(fn, in_shardings, out_shardings, mesh)` is
    `shard_function`, a program to be called from eager code.

    Raises:
        ShardingError: as these two.
    """
    if callable(tensor_or_function):
        return shard_function(tensor_or_function, *args, **kwargs)
    return _shard_tensor(tensor_or_function, *args, **kwargs)


def shard_function(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """`core.engine.functional.shard_function`: a function as one SPMD program, called from eager code."""
    from lingvo_moe.core.engine.functional import shard_function

    return shard_function(fn, *args, **kwargs)


def explain(program: Any, *args: Any, **kwargs: Any) -> "Explanation":
    """`explaining.explain`: how a program's tensors are cut, what is sent for it, and which line of the
    source asks for that."""
    from lingvo_moe.explaining import explain

    return explain(program, *args, **kwargs)


def get_sharding(program: Any, tensor_name: str) -> Any:
    """`explaining.get_sharding`: how one tensor of a program is cut after propagation."""
    from lingvo_moe.explaining import get_sharding

    return get_sharding(program, tensor_name)
