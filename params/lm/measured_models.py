"""Dense models whose steps others measured on TPUs and published: Lingvo's on v3, MaxText's on v4, v5e and v5p.

From their configurations (`lm/params/synthetic_packed_input.py`; `configs/{v4,v5e,v5p}`): sizes, rows, meshes, what is
recomputed. For MaxText's 22B we took heads of 256 numbers and a feed-forward layer without a gate: of the forms tried,
that one has the parameters of its name. Ours: learning rates. Not here, and added to each count in its docstring:
Lingvo's 32 relative position biases for each head of each layer of the models of 128B, and its learned positions,
instead of which the other two have sinusoids. Nobody has trained these models with this code.
"""

from typing import NamedTuple

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers import positions
from lingvo_moe.core.optimizers.adafactor import GShardAdafactor
from lingvo_moe.core.optimizers.adam import Adam

from .open_models import OpenModel


class Sizes(NamedTuple):
    """M, H, L and N."""

    model_dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int


class Measured(OpenModel):
    """Sizes, rows and mesh of a model."""

    SIZES = Sizes(1, 1, 1, 1)
    KEY_DIM = 128
    ROWS, ROW_LENGTH = 1, 2048
    MESH = ""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(vocab_size=32000, key_dim=self.KEY_DIM, **self.SIZES._asdict())

    def Input(self) -> InstantiableParams:
        return super().Input().Set(target_length=self.ROW_LENGTH, batch_size=self.ROWS)

    def Train(self) -> Params:
        return super().Train().Set(mesh=self.MESH)


# --- Lingvo


class DenseLm(Measured):
    """Both mesh axes shard each weight, and each activation of all widths: two-dimensional sharding."""

    ACTIVATION = "gelu"
    OPTIMIZER: type[GShardAdafactor] | type[Adam] = GShardAdafactor
    POSITION: type[positions.Positions] = positions.PositionalEmbedding

    def Task(self) -> InstantiableParams:
        inside = {"N": "model", "H": "model", "V": "model"}
        p = super().Task()
        return p.Set(
            tied_softmax=True,
            activation=self.ACTIVATION,
            position=self.POSITION.Params(),
            optimizer=self.OPTIMIZER.Params(),
            activation_split={"B": "data", "M": "model", **inside},
            weight_split={"M": "data", **inside},
        )

    def Train(self) -> Params:
        return super().Train().Set(shard_state="none")


@registry.Register
class DenseLm128B8x8(DenseLm):
    """137,702,154,240 parameters, and 262,144 position biases: 137,702,416,384."""

    SIZES = Sizes(8192, 65536, 64, 128)
    ACTIVATION = "geglu"
    POSITION = positions.Positions
    ROWS, ROW_LENGTH = 16, 1024
    MESH = "data:8,model:16"


@registry.Register
class DenseLm128B32x32(DenseLm128B8x8):
    """137,702,154,240 parameters, and 262,144 position biases: 137,702,416,384."""

    ROWS = 512
    MESH = "data:32,model:64"


@registry.Register
class DenseLm175B32x32(DenseLm):
    """174,341,763,072 parameters, and 25,165,824 of positions: 174,366,928,896."""

    SIZES = Sizes(12288, 49152, 96, 96)
    ROWS = 1024
    MESH = "data:64,model:32"


@registry.Register
class DenseLm12kWide41BAdam16x16(DenseLm):
    """43,880,361,984 parameters, and 25,165,824 of positions: 43,905,527,808."""

    SIZES = Sizes(12288, 49152, 24, 96)
    OPTIMIZER = Adam
    ROWS = 256
    MESH = "data:16,model:32"


# --- MaxText


class MaxText(Measured):
    """Rows and the state are sharded over `data` (fsdp there), heads and hidden units over `model` (tensor)."""

    KEPT = "full"

    def Task(self) -> InstantiableParams:
        return super().Task().Set(remat=self.KEPT)


@registry.Register
class MaxText16B(MaxText):
    """15,831,666,688 parameters. A slice of 256 v5e."""

    SIZES = Sizes(4096, 28672, 32, 64)
    ROWS = 6 * 256
    MESH = "data:256,model:1"


@registry.Register
class MaxText22B(MaxText):
    """22,137,083,904 parameters. 64 v4."""

    SIZES = Sizes(6144, 24576, 48, 24)
    KEY_DIM = 256
    ROWS = 13 * 64
    MESH = "data:64,model:1"

    def Task(self) -> InstantiableParams:
        return super().Task().Set(activation="relu")


@registry.Register
class MaxText32B(MaxText):
    """31,663,333,376 parameters. 64 v5p."""

    SIZES = Sizes(8192, 28672, 32, 64)
    ROWS = 6 * 64
    MESH = "data:16,model:4"
    KEPT = "dots"


@registry.Register
class MaxText64B(MaxText):
    """62,802,370,560 parameters. A slice of 256 v5e."""

    SIZES = Sizes(8192, 28672, 64, 64)
    ROWS = 2 * 256
    MESH = "data:256,model:1"


@registry.Register
class MaxText128B(MaxText):
    """125,079,396,352 parameters. 128 v5p."""

    SIZES = Sizes(8192, 57344, 64, 128)
    ROWS = 128
    MESH = "data:16,model:8"
    KEPT = "dots"


@registry.Register
class MaxText512B(MaxText):
    """499,268,993,024 parameters. 512 v5p."""

    SIZES = Sizes(16384, 57344, 128, 128)
    ROWS = 2 * 512
    MESH = "data:64,model:8"
