"""OLMoE (Muennighoff et al. 2024)."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers.extended_attention import ExtendedAttention

from .open_models import OpenModel, with_experts


@registry.Register
class OLMoE1B7B(OpenModel):
    """OLMoE (Muennighoff et al. 2024): 6,919,161,856 parameters, 1,282,017,280 of them active.

    Gates need not sum to one.
    """

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=50304, model_dim=2048, hidden_dim=1024, num_layers=16)
        with_experts(p, 64, 1024, k=8, normalize_gates="never", z_loss_weight=0.1)
        p.attention = ExtendedAttention.Params().Set(qk_norm="projection")
        return p.Set(num_heads=16)
