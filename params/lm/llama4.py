"""The text models of Llama 4 (Meta 2025)."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers import positions
from lingvo_moe.core.layers.extended_attention import ExtendedAttention

from .open_models import OpenModel, with_experts


class Llama4(OpenModel):
    """The text models of Llama 4 (Meta 2025): one expert a token, whose input the gate multiplies, and a shared one.

    Attention is in chunks of 8192 tokens, and in every fourth layer over all, without positions.
    """

    BASE = 500000.0
    QK_NORM = "none"

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=202048, model_dim=5120, hidden_dim=16384, num_layers=48)
        p.attention = ExtendedAttention.Params().Set(chunk=8192, qk_norm=self.QK_NORM)
        p.nth_attention = ExtendedAttention.Params().Set(
            use_positions=False, temperature_length=8192
        )
        return p.Set(num_heads=40, num_kv_heads=8, nth_attention_every=4)

    def Experts(self, p: InstantiableParams, num: int) -> InstantiableParams:
        """The task with so many experts."""
        with_experts(p, num, 8192, k=1, gate="sigmoid")
        p.moe.Set(num_shared_experts=1, gate_inputs=True)
        return p


@registry.Register
class Llama4Scout(Llama4):
    """107,769,861,120 parameters, 17,172,894,720 of them active."""

    QK_NORM = "unit"

    def Task(self) -> InstantiableParams:
        p = self.Experts(super().Task(), 16)
        p.position = positions.Llama3Rotary.Params().Set(
            max_timescale=self.BASE, factor=16.0, high_turns=1.0
        )
        return p


@registry.Register
class Llama4Maverick(Llama4):
    """400,711,848,960 parameters, 17,184,691,200 of them active. Every second layer has experts."""

    def Task(self) -> InstantiableParams:
        return self.Experts(super().Task(), 128).Set(moe_every=2)
