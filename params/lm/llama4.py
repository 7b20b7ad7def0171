"""Llama 4 (Meta 2025), its text models: an expert a token, whose input the gate multiplies, and a shared one; attention
in chunks, and in every n-th layer over all, without positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers import positions
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.core.weights.source import WeightsError
from lingvo_moe.tasks.families.family import Default

from . import llama
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


# --- the files of published weights

_LAYER = "model.layers.{layer}."
_FEED_FORWARD = f"{_LAYER}feed_forward."
_SHARED = f"{_FEED_FORWARD}shared_expert."
_GATE_UP = f"{_FEED_FORWARD}experts.gate_up_proj", "e m (first f + second f)"
_TEXT, _PREFIX = "text_config", "language_model."


class Llama4Family(llama.LlamaFamily):
    """Files with the text model alone. The pairs of numbers that positions turn lie side by side in them."""

    TYPES: ClassVar[tuple[str, ...]] = ("llama4_text",)
    ARCHITECTURE: ClassVar[str] = "Llama4ForCausalLM"
    EXPERIMENT: ClassVar[str] = "lm.Llama4Scout"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **llama.KEYS,
        "task.vocab_size": ("vocab_size", 202048),
        "task.model_dim": ("hidden_size", 5120),
        "task.hidden_dim": ("intermediate_size_mlp", 16384),
        "task.num_layers": ("num_hidden_layers", 48),
        "task.num_heads": ("num_attention_heads", 40),
        "task.num_kv_heads": ("num_key_value_heads", 8),
        "task.key_dim": ("head_dim", 128),
        "task.norm.epsilon": ("rms_norm_eps", 1e-5),
        "task.expert_hidden_dim": ("intermediate_size", 8192),
        "task.num_experts": ("num_local_experts", 16),
    }
    BASE: ClassVar[float] = 500000.0
    ALWAYS: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "num_experts_per_tok": 1,
    }
    OTHER_KEYS: ClassVar[Sequence[str]] = (
        *llama.LlamaFamily.OTHER_KEYS,
        *("attention_chunk_size", "attn_scale", "attn_temperature_tuning", "floor_scale"),
        *("interleave_moe_layer_step", "layer_types", "moe_layers"),
        *("no_rope_layer_interval", "no_rope_layers", "use_qk_norm"),
    )
    RULES: ClassVar[Sequence[WeightRule]] = (
        *llama.TABLES,
        WeightRule(
            f"{_LAYER}self_attn.q_proj.weight", "(n i two) m", "self_atten.q", "m n (two i)"
        ),
        WeightRule(
            f"{_LAYER}self_attn.k_proj.weight", "(a i two) m", "self_atten.k", "m a (two i)"
        ),
        *llama.ATTENTION[2:],
        *llama.NORMS,
        WeightRule(f"{_FEED_FORWARD}gate_proj.weight", "h m", "ffn.wi_gate", "m h"),
        WeightRule(f"{_FEED_FORWARD}up_proj.weight", "h m", "ffn.wi", "m h"),
        WeightRule(f"{_FEED_FORWARD}down_proj.weight", "m h", "ffn.wo", "h m"),
        WeightRule(f"{_FEED_FORWARD}router.weight", "e m", "ffn.router.wg", "m e"),
        WeightRule(*_GATE_UP, "ffn.experts.wi_gate", "e m (first f)"),
        WeightRule(*_GATE_UP, "ffn.experts.wi", "e m (second f)"),
        WeightRule(f"{_FEED_FORWARD}experts.down_proj", "e f m", "ffn.experts.wo", "e f m"),
        WeightRule(f"{_SHARED}gate_proj.weight", "f m", "ffn.shared_experts.wi_gate", "m f"),
        WeightRule(f"{_SHARED}up_proj.weight", "f m", "ffn.shared_experts.wi", "m f"),
        WeightRule(f"{_SHARED}down_proj.weight", "m f", "ffn.shared_experts.wo", "f m"),
    )

    def Sizes(self, p: Params) -> dict[str, int]:
        return super().Sizes(p) | {"i": p.key_dim // 2}

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        chunk = config.get("attention_chunk_size", 8192) or 0
        values = {
            "task.attention.chunk": chunk,
            "task.attention.qk_norm": "unit" if config.get("use_qk_norm", True) else "none",
            "task.nth_attention.temperature_length": 0,
            "task.moe_every": config.get("interleave_moe_layer_step", 1),
            "task.nth_attention_every": config.get("no_rope_layer_interval", 4),
        }
        if config.get("attn_temperature_tuning", True):
            values |= {
                "task.nth_attention.temperature_length": config.get("floor_scale", 8192),
                "task.nth_attention.temperature_scale": config.get("attn_scale", 0.1),
            }
        if (layers := config.get("moe_layers")) is not None:
            values["task.moe_every"] = _every(layers, config, where, "moe_layers")
        if turned := config.get("no_rope_layers"):
            layers = [i for i, turns in enumerate(turned) if not turns]
            values["task.nth_attention_every"] = _every(layers, config, where, "no_rope_layers")
        n, kinds = values["task.nth_attention_every"], config.get("layer_types") or []
        if kinds != [
            "chunked_attention" if chunk and (i + 1) % n else "full_attention"
            for i in range(len(kinds))
        ]:
            raise WeightsError(
                f"{where}: layer_types={kinds} cannot be represented; expected chunks in the layers with positions"
            )
        return super().Others(config, where) | values

    def OtherKeys(self, p: Params) -> dict[str, Any]:
        if "chunk" not in p.attention or p.nth_attention is None:
            return {}
        nth = p.nth_attention
        scaled = {"floor_scale": nth.temperature_length, "attn_scale": nth.temperature_scale}
        return {
            **super().OtherKeys(p),
            "attention_chunk_size": p.attention.chunk or None,
            "use_qk_norm": p.attention.qk_norm == "unit",
            "attn_temperature_tuning": bool(nth.temperature_length),
            **(scaled if nth.temperature_length else {}),
            "interleave_moe_layer_step": p.moe_every,
            "no_rope_layer_interval": p.nth_attention_every,
        }


def _every(layers: Sequence[int], config: Mapping[str, Any], where: str, key: str) -> int:
    """The n of which every n-th layer, the last one too, is among `layers`. Raises WeightsError: others are."""
    n = layers[0] + 1 if layers else 0
    count = config.get("num_hidden_layers", 48)
    if n * len(layers) != count or list(layers) != list(range(n - 1, count, n)):
        raise WeightsError(
            f"{where}: {key}={config[key]} cannot be represented; expected every n-th of {count} layers"
        )
    return n


class Llama4WithImagesFamily(Llama4Family):
    """Files as they are published, of which the text model is a part."""

    TYPES: ClassVar[tuple[str, ...]] = ("llama4",)
    ARCHITECTURE: ClassVar[str] = "Llama4ForConditionalGeneration"
    RULES: ClassVar[Sequence[WeightRule]] = tuple(
        replace(rule, tensor=_PREFIX + rule.tensor) for rule in Llama4Family.RULES
    )
    LEFT_OUT: ClassVar[Sequence[str]] = (r"vision_model\..*", r"multi_modal_projector\..*")
    _OF_IMAGES: ClassVar[Sequence[str]] = (
        *("vision_config", "image_token_index", "boi_token_index", "eoi_token_index"),
    )

    def Overrides(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        text = config.get(_TEXT)
        if not isinstance(text, dict):
            raise WeightsError(f"{where}: {_TEXT}={text!r}; expected an object")
        others = {k: v for k, v in config.items() if k not in (_TEXT, *self._OF_IMAGES)}
        return super().Overrides({**others, **text}, where)
