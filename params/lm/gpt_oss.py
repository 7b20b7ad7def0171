"""gpt-oss (OpenAI 2025)."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers import positions
from lingvo_moe.core.layers.extended_attention import ExtendedAttention

from .open_models import OpenModel, with_experts


class GptOss(OpenModel):
    """gpt-oss (OpenAI 2025): 4 experts a token, biases, sinks, and a window of 128 tokens in every second layer."""

    BASE = 150000.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=201088, model_dim=2880, hidden_dim=2880, key_dim=64)
        every = ExtendedAttention.Params().Set(biases=True, sinks=True)
        p.Set(num_heads=64, num_kv_heads=8, activation="clamped_swiglu", nth_attention=every)
        p.attention = every.Copy().Set(window=128)
        p.position = positions.YarnRotary.Params().Set(
            max_timescale=self.BASE, factor=32.0, original_length=4096, whole_pairs=False
        )
        return p

    def Experts(self, p: InstantiableParams, num: int) -> InstantiableParams:
        """The task with so many experts."""
        with_experts(p, num, 2880, k=4, logit_bias=True)
        p.moe.experts.biases = True
        return p


@registry.Register
class GptOss20B(GptOss):
    """20,914,757,184 parameters, 4,187,440,704 of them active."""

    def Task(self) -> InstantiableParams:
        return self.Experts(super().Task().Set(num_layers=24), 32)


@registry.Register
class GptOss120B(GptOss):
    """116,829,156,672 parameters, 5,711,982,912 of them active."""

    def Task(self) -> InstantiableParams:
        return self.Experts(super().Task().Set(num_layers=36), 128)
