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
| `device_index`, `all_reduce`, `rotate` | inside such code: a device's position, sums, the next device's tensor | |
| `looped_einsum` | two large operands, neither of them gathered | 3.3.2, figure 4c |
| `shard(fn, ...)`, `shard_function` | a function called from eager code as one program | |
| `auto_shard(fn, mesh, ...)` | the same, whose sharding is searched for | |
| `explain`, `get_sharding` | the shardings and the communication of a program | |
| `verify` | whether a function over a mesh is what it is on one device | |

The engine is imported when a function that needs it is first asked for, not by this module.
"""

import importlib
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

if TYPE_CHECKING:  # they import the engine
    from lingvo_moe.analysis.explain.explaining import explain, get_sharding
    from lingvo_moe.analysis.explain.verifying import verify
    from lingvo_moe.analysis.search.auto_shard.function import auto_shard
    from lingvo_moe.core.engine.eager.functional import shard_function

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
_LATER = {
    "auto_shard": "lingvo_moe.analysis.search.auto_shard.function",
    "explain": "lingvo_moe.analysis.explain.explaining",
    "get_sharding": "lingvo_moe.analysis.explain.explaining",
    "shard_function": "lingvo_moe.core.engine.eager.functional",
    "verify": "lingvo_moe.analysis.explain.verifying",
}


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
        from lingvo_moe.core.engine.eager.functional import shard_function

        return shard_function(tensor_or_function, *args, **kwargs)
    return _shard_tensor(tensor_or_function, *args, **kwargs)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


if not TYPE_CHECKING:  # which knows these names

    def __getattr__(name: str) -> Any:
        """A function of another module, which is imported when it is first asked for."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_LATER[name]), name)
