"""A small MoE layer on eight devices, whose groups and experts are sharded, for tests of what it communicates.

Letters: B batch, T time, M model, H hidden, E expert.
"""

import numpy as np

from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh

B, T, M, H, E = 16, 12, 8, 24, 16
MESH = Mesh.parse("expert:8")
ROWS = ("expert", None, None)
SPLITS = {
    "activation_split": {"B": "expert", "G": "expert", "E": "expert"},
    "weight_split": {"E": "expert"},
}


def layer(**params) -> MoELayer:
    """A layer with eight groups; `params` override the others."""
    p = MoELayer.Params().Set(
        name="moe",
        model_dim=M,
        hidden_dim=H,
        num_experts=E,
        num_groups=8,
        capacity_factor=1.0,
        min_capacity=1,
        **SPLITS,
    )
    return p.Set(**params).Instantiate()


def arguments(moe: MoELayer) -> tuple[list, list]:
    """Theta, inputs [B,T,M], paddings [B,T] and a seed; and their shardings in training."""
    with use_mesh(single_device()):
        theta = moe.InitTheta(make_seed(0, 0))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, T, M)).astype(np.float32)
    paddings = (rng.random((B, T)) < 0.2).astype(np.float32)
    seed = np.array([3, 4], np.int32)
    return [theta, x, paddings, seed], [moe.VariableSpecs(), ROWS, ROWS[:2], None]
