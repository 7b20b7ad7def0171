"""Sharding annotations over named meshes (GShard paper, section 3.2 and appendix A.3).

`from lingvo_moe.core import sharding`, then `sharding.split(...)`. Importing the package does not
import TensorFlow; the functions that annotate tensors do.
"""

import importlib
from typing import Any

from lingvo_moe.core.sharding.letters import (
    Axis,
    DimsMapping,
    SplitMap,
    check_mapping,
    dims_mapping,
)
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError, current_mesh, single_device, use_mesh

# Functions by their modules, which are imported when they are first asked for. Most need TensorFlow.
_LAZY = {
    "mesh_split": "annotate",
    "plan_redistribution": "redistribution_plan",
    "redistribute": "redistribution",
    "replicate": "annotate",
    "shard": "annotate",
    "shard_letters": "annotate",
    "split": "annotate",
}

__all__ = [
    "Axis",
    "DimsMapping",
    "Mesh",
    "ShardingError",
    "SplitMap",
    "check_mapping",
    "current_mesh",
    "dims_mapping",
    "single_device",
    "use_mesh",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(f"lingvo_moe.core.sharding.{_LAZY[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
