"""OLMoE (Muennighoff et al. 2024): experts in each layer; queries and keys are normalized over all heads together."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.tasks.families.family import Default, gate_keys, gates

from . import llama
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


# --- the files of published weights

_ATTENTION = "model.layers.{layer}.self_attn."


class OlmoeFamily(llama.LlamaFamily):
    """See the module."""

    TYPES: ClassVar[tuple[str, ...]] = ("olmoe",)
    ARCHITECTURE: ClassVar[str] = "OlmoeForCausalLM"
    EXPERIMENT: ClassVar[str] = "lm.OLMoE1B7B"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **llama.KEYS,
        **llama.BIASED,
        "task.vocab_size": ("vocab_size", 50304),
        "task.model_dim": ("hidden_size", 2048),
        "task.hidden_dim": ("intermediate_size", 2048),
        "task.num_layers": ("num_hidden_layers", 16),
        "task.num_heads": ("num_attention_heads", 16),
        "task.norm.epsilon": ("rms_norm_eps", 1e-5),
        "task.expert_hidden_dim": ("intermediate_size", 2048),
        "task.num_experts": ("num_experts", 64),
        "task.moe.router.k": ("num_experts_per_tok", 8),
    }
    ALIASES: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    ALWAYS: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "clip_qkv": None}
    OTHER_KEYS: ClassVar[Sequence[str]] = (*llama.LlamaFamily.OTHER_KEYS, "norm_topk_prob")
    RULES: ClassVar[Sequence[WeightRule]] = (
        *llama.TABLES,
        *llama.ATTENTION,
        *llama.BIASES,
        WeightRule(f"{_ATTENTION}q_norm.weight", "(n k)", "self_atten.q_norm", "n k"),
        WeightRule(f"{_ATTENTION}k_norm.weight", "(a k)", "self_atten.k_norm", "a k"),
        *llama.NORMS,
        *llama.EXPERTS,
    )

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().Others(config, where) | gates(config, where)

    def OtherKeys(self, p: Params) -> dict[str, Any]:
        return super().OtherKeys(p) | gate_keys(p)
