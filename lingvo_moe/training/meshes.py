"""The mesh of an experiment, and whether it shards the state that is asked for."""

from typing import TYPE_CHECKING

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import GRADIENTS, NONE, SLOTS
from lingvo_moe.training.checks import UsageError

if TYPE_CHECKING:  # it imports TensorFlow
    from lingvo_moe.core.task.base_task import BaseTask


def make_mesh(params: Params, text: str = "", num_devices: int = 0) -> Mesh:
    """Parses `--mesh`, or takes the experiment's `train.mesh` and resizes it to the devices.

    Args:
        text: the value of `--mesh`; '' takes `train.mesh`.
        num_devices: devices to fit `train.mesh` to; 0 keeps its own size.

    Raises:
        ShardingError: the text is not a mesh, or the mesh does not fit the number of devices.
    """
    if text:
        return Mesh.parse(text)
    mesh = Mesh.parse(params.train.mesh, "train.mesh")
    return mesh.over_devices(num_devices) if num_devices else mesh


def check_state_is_sharded(override: str, task: "BaseTask", mesh: Mesh) -> None:
    """Raises UsageError if an override asks for a level of train.shard_state that shards nothing over a mesh."""
    path = "train.shard_state"
    level = dict(registry.split_override(override)).get(path, NONE)
    if level == NONE or _shards_more(task, level, mesh):
        return
    why = f"mesh {mesh}, along whose axes there are no copies that they divide; leave it out"
    if mesh.size == 1:
        why = (
            f"one device (mesh {mesh}), which holds all of the state; leave it out or train on several (--engine=pjrt, "
            "--num_devices)"
        )
    raise UsageError(f"{path}={level}: has no effect on {why}")


def _shards_more(task: "BaseTask", level: str, mesh: Mesh) -> bool:
    """Whether a level shards a tensor of its part of the state further than the letters do."""
    if level == GRADIENTS:
        specs = task.GradientSpecs().Flatten()
    else:
        state = task.StateSpecs()
        names = (
            [name for name in ("slots", "ema") if name in state] if level == SLOTS else ["theta"]
        )
        specs = [spec for name in names for spec in state[name].Flatten()]
    return mesh.size > 1 and any(spec.StoredSplit(mesh) != spec.split for spec in specs)
