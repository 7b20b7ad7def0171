"""DeepSeek-V2 and V3, and Kimi K2: latent attention, shared experts, dense first layers."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers import positions
from lingvo_moe.core.layers.latent_attention import LatentAttention

from .open_models import OpenModel, with_experts


class DeepSeek(OpenModel):
    """The parts of DeepSeek-V2 and V3, and Kimi K2: latent attention, shared experts, dense first layers."""

    EPSILON = 1e-6
    HEADS = 128
    QUERY_RANK = 1536
    MSCALE = 1.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(num_heads=self.HEADS, key_dim=128)
        p.attention = LatentAttention.Params().Set(rank=512, query_rank=self.QUERY_RANK)
        p.position = positions.YarnRotary.Params().Set(
            max_timescale=self.BASE,
            factor=40.0,
            original_length=4096,
            mscale=self.MSCALE,
            mscale_all=self.MSCALE,
        )
        return p


@registry.Register
class DeepSeekV2Lite(DeepSeek):
    """DeepSeek-V2-Lite (2024): 15,706,484,224 parameters, 2,661,150,208 of them active."""

    HEADS, QUERY_RANK, MSCALE = 16, 0, 0.707

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=102400, model_dim=2048, hidden_dim=10944, num_layers=27)
        with_experts(p, 64, 1408, k=6, normalize_gates="never")
        p.moe.num_shared_experts = 2
        return p.Set(dense_first_layers=1)


class SigmoidRouted(DeepSeek):
    """Experts chosen by sigmoid scores and a bias that balances them; a loss by row of weight 0.0001 (V3's report)."""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(model_dim=7168, hidden_dim=18432, num_layers=61)

    def Experts(self, p: InstantiableParams, num: int, **router: object) -> InstantiableParams:
        """The task with so many experts of 2048, 8 of which a token visits, and a shared one."""
        with_experts(p, num, 2048, k=8, gate="sigmoid", balance_bias=0.001, **router)
        p.moe.num_shared_experts = 1
        return p.Set(aux_loss_weight=1e-4)


@registry.Register
class DeepSeekV3(SigmoidRouted):
    """DeepSeek-V3 (2024): 671,026,419,200 parameters, 37,552,297,472 of them active, balance biases included.

    Its head for the token after the next, `task.multi_token_weight=0.3`, has 11,610,068,224 more.
    """

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=129280)
        groups = {"expert_groups": 8, "groups_per_token": 4}
        return self.Experts(p, 256, gate_scale=2.5, **groups).Set(dense_first_layers=3)


@registry.Register
class KimiK2(SigmoidRouted):
    """Kimi K2 (2025): 1,026,408,232,448 parameters, 32,861,500,928 of them active."""

    HEADS, BASE = 64, 50000.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=163840)
        p.position.Set(factor=32.0, fast_turns=1.0)
        return self.Experts(p, 384, gate_scale=2.827).Set(dense_first_layers=1)
