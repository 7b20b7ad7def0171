"""gpt-oss: biases, a learned logit beside each softmax of attention, a window in every second layer, and experts in
files of bfloat16 or MXFP4, whose gates and linear parts take turns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers import positions
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.core.weights.source import WeightsError
from lingvo_moe.tasks.families.family import Default

from . import llama
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


# --- the files of published weights

_ATTENTION, _MLP = (f"model.layers.{{layer}}.{part}." for part in ("self_attn", "mlp"))
_EXPERTS = f"{_MLP}experts."
_GATE_UP = f"{_EXPERTS}gate_up_proj", "e m (f (first + second))"
_GATE_UP_BIAS = f"{_EXPERTS}gate_up_proj_bias", "e (f (first + second))"
_POSITIONS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_WINDOWED, _WHOLE = "sliding_attention", "full_attention"


class GptOssFamily(llama.LlamaFamily):
    """See the module."""

    TYPES: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    ARCHITECTURE: ClassVar[str] = "GptOssForCausalLM"
    EXPERIMENT: ClassVar[str] = "lm.GptOss120B"
    BASE: ClassVar[float] = 150000.0
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **llama.KEYS,
        "task.vocab_size": ("vocab_size", 201088),
        "task.model_dim": ("hidden_size", 2880),
        "task.hidden_dim": ("intermediate_size", 2880),
        "task.num_layers": ("num_hidden_layers", 36),
        "task.num_heads": ("num_attention_heads", 64),
        "task.num_kv_heads": ("num_key_value_heads", 8),
        "task.key_dim": ("head_dim", 64),
        "task.norm.epsilon": ("rms_norm_eps", 1e-5),
        "task.attention.window": ("sliding_window", 128),
        "task.expert_hidden_dim": ("intermediate_size", 2880),
        "task.num_experts": ("num_local_experts", 128),
        "task.moe.router.k": ("num_experts_per_tok", 4),
    }
    ALWAYS: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    OTHER_KEYS: ClassVar[Sequence[str]] = (
        *llama.LlamaFamily.OTHER_KEYS,
        *("layer_types", "experts_per_token", "initial_context_length"),
    )
    RULES: ClassVar[Sequence[WeightRule]] = (
        *llama.TABLES,
        *llama.ATTENTION,
        *llama.BIASES,
        WeightRule(f"{_ATTENTION}sinks", "n", "self_atten.sinks", "n"),
        *llama.NORMS,
        WeightRule(f"{_MLP}router.weight", "e m", "ffn.router.wg", "m e"),
        WeightRule(f"{_MLP}router.bias", "e", "ffn.router.logit_bias", "e"),
        WeightRule(*_GATE_UP, "ffn.experts.wi_gate", "e m (f first)"),
        WeightRule(*_GATE_UP, "ffn.experts.wi", "e m (f second)"),
        WeightRule(*_GATE_UP_BIAS, "ffn.experts.wi_gate_bias", "e (f first)"),
        WeightRule(*_GATE_UP_BIAS, "ffn.experts.wi_bias", "e (f second)"),
        WeightRule(f"{_EXPERTS}down_proj", "e f m", "ffn.experts.wo", "e f m"),
        WeightRule(f"{_EXPERTS}down_proj_bias", "e m", "ffn.experts.wo_bias", "e m"),
    )

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        layers = config.get("num_hidden_layers") or 36
        turns = [(_WINDOWED, _WHOLE)[i % 2] for i in range(layers if type(layers) is int else 0)]
        if (types := config.get("layer_types")) not in (None, turns):
            raise WeightsError(
                f"{where}: layer_types={types!r} cannot be represented; expected {_WINDOWED} and {_WHOLE} in turn"
            )
        chosen = config.get("num_experts_per_tok", 4)
        if config.get("experts_per_token", chosen) != chosen:
            raise WeightsError(
                f"{where}: experts_per_token={config['experts_per_token']!r}, and num_experts_per_tok={chosen!r}"
            )
        keys = ("rope_parameters", "rope_scaling")
        if not any(config.get(key) for key in keys):
            config = {**config, "rope_scaling": _POSITIONS}
        return super().Others(config, where)
