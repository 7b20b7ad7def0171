"""Sharding annotations, as the paper's section 3.2 and appendix A.3 have them, over named meshes.

`from lingvo_moe.core import sharding`, then `sharding.split(...)`. Importing the package does not
import TensorFlow; the functions that annotate tensors do.
"""

from typing import Any

from lingvo_moe.core.sharding.letters import (
    Axis,
    DimsMapping,
    SplitMap,
    check_mapping,
    dims_mapping,
)
from lingvo_moe.core.sharding.mesh import (
    Mesh,
    ShardingError,
    current_mesh,
    single_device,
    use_mesh,
)

_ANNOTATIONS = ("mesh_split", "replicate", "shard", "shard_letters", "split")

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
    if name in _ANNOTATIONS:
        from lingvo_moe.core.sharding import annotate

        return getattr(annotate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
