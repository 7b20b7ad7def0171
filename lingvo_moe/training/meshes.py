"""The mesh of an experiment."""

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.sharding import Mesh


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
