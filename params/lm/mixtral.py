"""Mistral (Jiang et al. 2023), and Mixtral of experts (Jiang et al. 2024)."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers.extended_attention import ExtendedAttention

from .open_models import OpenModel, with_experts


@registry.Register
class Mistral7B(OpenModel):
    """7,241,732,096 parameters. A query looks at 4096 tokens."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=32000, model_dim=4096, hidden_dim=14336, num_layers=32)
        p.attention = ExtendedAttention.Params().Set(window=4096)
        return p.Set(num_heads=32, num_kv_heads=8)


class Mixtral(OpenModel):
    """Mixtral of experts (Jiang et al. 2024): two of 8 experts, gates that sum to one."""

    BASE = 1000000.0


@registry.Register
class Mixtral8x7B(Mixtral):
    """46,702,792,704 parameters, 12,879,925,248 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=32000, model_dim=4096, hidden_dim=14336, num_layers=32)
        with_experts(p, 8, 14336, k=2)
        return p.Set(num_heads=32, num_kv_heads=8)


@registry.Register
class Mixtral8x22B(Mixtral):
    """140,630,071,296 parameters, 39,161,468,928 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=32768, model_dim=6144, hidden_dim=16384, num_layers=56)
        with_experts(p, 8, 16384, k=2)
        return p.Set(num_heads=48, num_kv_heads=8)


@registry.Register
class ImportedMixtral(Mixtral8x7B):
    """Mixtral of any size, which a checkpoint says."""
