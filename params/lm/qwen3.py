"""Qwen3 (Yang et al. 2025), dense and with experts: Llama's layers with normalized queries and keys."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.core.weights.source import WeightsError
from lingvo_moe.tasks.families.family import Default, gate_keys, gates

from . import llama
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


# --- the files of published weights

_ATTENTION = "model.layers.{layer}.self_attn."


class Qwen3Family(llama.LlamaFamily):
    """The dense models."""

    TYPES: ClassVar[tuple[str, ...]] = ("qwen3",)
    ARCHITECTURE: ClassVar[str] = "Qwen3ForCausalLM"
    EXPERIMENT: ClassVar[str] = "lm.Qwen3_8B"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **llama.KEYS,
        **llama.BIASED,
        "task.vocab_size": ("vocab_size", 151936),
        "task.hidden_dim": ("intermediate_size", 22016),
        "task.num_kv_heads": ("num_key_value_heads", 32),
        "task.key_dim": ("head_dim", 128),
    }
    ALWAYS: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "use_sliding_window": False}
    # Without a window, its sizes say nothing.
    OTHER_KEYS: ClassVar[Sequence[str]] = (
        *llama.LlamaFamily.OTHER_KEYS,
        *("layer_types", "max_window_layers", "sliding_window"),
    )
    RULES: ClassVar[Sequence[WeightRule]] = (
        *llama.LlamaFamily.RULES,
        WeightRule(f"{_ATTENTION}q_norm.weight", "k", "self_atten.q_norm", "k"),
        WeightRule(f"{_ATTENTION}k_norm.weight", "k", "self_atten.k_norm", "k"),
    )

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        types = config.get("layer_types") or []
        if set(types) - {"full_attention"}:
            raise WeightsError(
                f"{where}: layer_types={types} cannot be represented; expected full_attention"
            )
        return super().Others(config, where)


class Qwen3MoeFamily(Qwen3Family):
    """The models with experts."""

    TYPES: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    ARCHITECTURE: ClassVar[str] = "Qwen3MoeForCausalLM"
    EXPERIMENT: ClassVar[str] = "lm.Qwen3_30B_A3B"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **Qwen3Family.KEYS,
        "task.model_dim": ("hidden_size", 2048),
        "task.hidden_dim": ("intermediate_size", 6144),
        "task.num_layers": ("num_hidden_layers", 24),
        "task.num_kv_heads": ("num_key_value_heads", 4),
        "task.key_dim": llama.KEYS["task.key_dim"],
        "task.moe_every": ("decoder_sparse_step", 1),
        "task.expert_hidden_dim": ("moe_intermediate_size", 768),
        "task.num_experts": ("num_experts", 128),
        "task.moe.router.k": ("num_experts_per_tok", 8),
    }
    ALIASES: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    ALWAYS: ClassVar[Mapping[str, Any]] = {**Qwen3Family.ALWAYS, "mlp_only_layers": []}
    OTHER_KEYS: ClassVar[Sequence[str]] = (*Qwen3Family.OTHER_KEYS, "norm_topk_prob")
    RULES: ClassVar[Sequence[WeightRule]] = (*Qwen3Family.RULES, *llama.EXPERTS)

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().Others(config, where) | gates(config, where)

    def OtherKeys(self, p: Params) -> dict[str, Any]:
        return super().OtherKeys(p) | gate_keys(p)
