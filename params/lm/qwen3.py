"""Qwen3 (Yang et al. 2025), dense and with experts."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers.extended_attention import ExtendedAttention

from .open_models import OpenModel, with_experts


class Qwen3(OpenModel):
    """Qwen3 (Yang et al. 2025): normalized queries and keys."""

    BASE, EPSILON = 1000000.0, 1e-6

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=151936, num_kv_heads=4)
        p.attention = ExtendedAttention.Params().Set(qk_norm="head")
        return p


@registry.Register
class Qwen3_8B(Qwen3):
    """8,190,735,360 parameters."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(model_dim=4096, hidden_dim=12288, num_layers=36, num_heads=32)
        return p.Set(num_kv_heads=8)


@registry.Register
class Qwen3_30B_A3B(Qwen3):
    """8 of 128 experts: 30,532,122,624 parameters, 3,353,032,704 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(model_dim=2048, hidden_dim=6144, num_layers=48, num_heads=32)
        with_experts(p, 128, 768, k=8)
        return p


@registry.Register
class Qwen3_235B_A22B(Qwen3):
    """8 of 128 experts: 235,093,634,560 parameters, 22,190,763,520 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(model_dim=4096, hidden_dim=12288, num_layers=94, num_heads=64)
        with_experts(p, 128, 1536, k=8)
        return p
