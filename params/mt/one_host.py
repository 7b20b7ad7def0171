"""A model for one host of eight devices, whose memory holds most of the training state. It is not the paper's."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params

from . import m4


@registry.Register
class M4MoE200E60LOneHost(m4.M4Base):
    """MoE(200E, 60L): 102B; 102,026,346,496 parameters here, on one host of eight devices. Not in the paper.

    8 devices, 256k tokens, bfloat16 weights with float32 master weights. The experts, their gradients and master
    weights are in the host's memory; a device holds those of a layer or two.
    """

    LAYERS, EXPERTS, CORES, BATCH_TOKENS = 60, 200, 8, 2**18
    GROUP_TOKENS = 2048  # the number in the paper's largest models

    def Task(self) -> InstantiableParams:
        groups = self.BATCH_TOKENS // self.GROUP_TOKENS
        return super().Task().Set(dtype="bfloat16", fprop_dtype="bfloat16", num_groups=groups)

    def Train(self) -> Params:
        return super().Train().Set(offload="experts")
