"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024) and SmolLM2 (Allal et al. 2025): RMS normalization,
SwiGLU, rotary positions, heads of keys and values for several of queries.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers import positions
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.core.weights.source import WeightsError
from lingvo_moe.tasks.families.family import HEAD, TABLE, Default, Family

from .open_models import OpenModel


class Llama31(OpenModel):
    """Llama 3.1 (Grattafiori et al. 2024)."""

    BASE = 500000.0

    def Task(self) -> InstantiableParams:
        position = positions.Llama3Rotary.Params().Set(max_timescale=self.BASE)
        return super().Task().Set(vocab_size=128256, num_kv_heads=8, position=position)


@registry.Register
class Llama31_8B(Llama31):
    """8,030,261,248 parameters."""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(model_dim=4096, hidden_dim=14336, num_layers=32, num_heads=32)


@registry.Register
class Llama31_70B(Llama31):
    """70,553,706,496 parameters."""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(model_dim=8192, hidden_dim=28672, num_layers=80, num_heads=64)


@registry.Register
class Llama31_405B(Llama31):
    """405,853,388,800 parameters."""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(model_dim=16384, hidden_dim=53248, num_layers=126, num_heads=128)


@registry.Register
class SmolLM2_135M(OpenModel):
    """134,515,008 parameters."""

    BASE = 100000.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=49152, tied_softmax=True)
        p.Set(model_dim=576, hidden_dim=1536, num_layers=30)
        return p.Set(num_heads=9, num_kv_heads=3, key_dim=64)


@registry.Register
class ImportedLlama(OpenModel):
    """Llama and SmolLM2 of any size, which a checkpoint says. The first has 6,738,415,616 parameters."""

    def Task(self) -> InstantiableParams:
        sizes = {"model_dim": 4096, "hidden_dim": 11008, "num_layers": 32, "num_heads": 32}
        return super().Task().Set(vocab_size=32000, **sizes)


# --- the files of published weights

_LAYER = "model.layers.{layer}."
ATTENTION = (
    WeightRule(f"{_LAYER}self_attn.q_proj.weight", "(n k) m", "self_atten.q", "m n k"),
    WeightRule(f"{_LAYER}self_attn.k_proj.weight", "(a k) m", "self_atten.k", "m a k"),
    WeightRule(f"{_LAYER}self_attn.v_proj.weight", "(a k) m", "self_atten.v", "m a k"),
    WeightRule(f"{_LAYER}self_attn.o_proj.weight", "m (n k)", "self_atten.o", "n k m"),
)
BIASES = (
    WeightRule(f"{_LAYER}self_attn.q_proj.bias", "(n k)", "self_atten.q_bias", "n k"),
    WeightRule(f"{_LAYER}self_attn.k_proj.bias", "(a k)", "self_atten.k_bias", "a k"),
    WeightRule(f"{_LAYER}self_attn.v_proj.bias", "(a k)", "self_atten.v_bias", "a k"),
    WeightRule(f"{_LAYER}self_attn.o_proj.bias", "m", "self_atten.o_bias", "m"),
)
NORMS = (
    WeightRule(f"{_LAYER}input_layernorm.weight", "m", "self_norm.scale", "m"),
    WeightRule(f"{_LAYER}post_attention_layernorm.weight", "m", "ffn_norm.scale", "m"),
    WeightRule("model.norm.weight", "m", "decoder.final_norm.scale", "m"),
)
TABLES = (
    WeightRule(TABLE, "v m", "embedding.table", "v m"),
    WeightRule(HEAD, "v m", "softmax.table", "v m"),
)
FEED_FORWARD = (
    WeightRule(f"{_LAYER}mlp.gate_proj.weight", "h m", "ffn.wi_gate", "m h"),
    WeightRule(f"{_LAYER}mlp.up_proj.weight", "h m", "ffn.wi", "m h"),
    WeightRule(f"{_LAYER}mlp.down_proj.weight", "m h", "ffn.wo", "h m"),
)
EXPERTS = (
    WeightRule(f"{_LAYER}mlp.gate.weight", "e m", "ffn.router.wg", "m e"),
    WeightRule(
        f"{_LAYER}mlp.experts.{{expert}}.gate_proj.weight", "f m", "ffn.experts.wi_gate", "m f"
    ),
    WeightRule(f"{_LAYER}mlp.experts.{{expert}}.up_proj.weight", "f m", "ffn.experts.wi", "m f"),
    WeightRule(f"{_LAYER}mlp.experts.{{expert}}.down_proj.weight", "m f", "ffn.experts.wo", "f m"),
)
KEYS: Mapping[str, tuple[str, Default]] = {
    "task.vocab_size": ("vocab_size", 32000),
    "task.model_dim": ("hidden_size", 4096),
    "task.hidden_dim": ("intermediate_size", 11008),
    "task.num_layers": ("num_hidden_layers", 32),
    "task.num_heads": ("num_attention_heads", 32),
    "task.num_kv_heads": ("num_key_value_heads", lambda v: v["task.num_heads"]),
    "task.key_dim": ("head_dim", lambda v: v["task.model_dim"] // (v["task.num_heads"] or 1)),
    "task.norm.epsilon": ("rms_norm_eps", 1e-6),
    "task.tied_softmax": ("tie_word_embeddings", False),
}
BIASED: Mapping[str, tuple[str, Default]] = {"task.attention.biases": ("attention_bias", False)}


class LlamaFamily(Family):
    """See the module.

    Attributes:
        BASE: that of positions, where config.json does not say it.
    """

    TYPES: ClassVar[tuple[str, ...]] = ("llama",)
    ARCHITECTURE: ClassVar[str] = "LlamaForCausalLM"
    EXPERIMENT: ClassVar[str] = "lm.ImportedLlama"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {**KEYS, **BIASED}
    BASE: ClassVar[float] = 10000.0
    ALWAYS: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_interleaved": False,
    }
    OTHER_KEYS: ClassVar[Sequence[str]] = ("rope_theta", "rope_scaling", "rope_parameters")
    RULES: ClassVar[Sequence[WeightRule]] = (
        *TABLES,
        *ATTENTION,
        *BIASES,
        *NORMS,
        *FEED_FORWARD,
    )
    # What positions compute; and the head, where it is a copy of the embeddings.
    LEFT_OUT: ClassVar[Sequence[str]] = (
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        re.escape(HEAD),
    )

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        return rotary(config, where, self.BASE)

    def OtherKeys(self, p: Params) -> dict[str, Any]:
        return rotary_keys(p.position)


# The parameters of scaled positions by their keys, and the values of keys that may be left out.
_ORIGINAL = {"factor": "factor", "original_max_position_embeddings": "original_length"}
_SCALED = {
    "llama3": (_ORIGINAL | {"low_freq_factor": "low_turns", "high_freq_factor": "high_turns"}, {}),
    "yarn": (
        _ORIGINAL
        | {"beta_fast": "fast_turns", "beta_slow": "slow_turns", "truncate": "whole_pairs"}
        | {"mscale": "mscale", "mscale_all_dim": "mscale_all"},
        {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        },
    ),
}


def rotary(
    config: Mapping[str, Any], where: str, base: float, scales: bool = False
) -> dict[str, Any]:
    """The parameters of positions.

    Args:
        config: what config.json says.
        where: its path, for messages.
        base: of the angles, where no key says it.
        scales: whether YaRN's mscale_all_dim multiplies the products of queries and keys, as in DeepSeek alone.

    Raises WeightsError: a kind of scaling that is not known, or a key of it.
    """
    there = [x for key in ("rope_parameters", "rope_scaling") if (x := config.get(key))]
    scaling = there[-1] if there else {}
    if not isinstance(scaling, dict):
        raise WeightsError(f"{where}: rope_scaling={scaling!r}; expected an object")
    if there and there[0] != scaling:
        raise WeightsError(f"{where}: rope_scaling={scaling!r}, and rope_parameters={there[0]!r}")
    scaling = dict(scaling)
    base = scaling.pop("rope_theta", None) or config.get("rope_theta") or base
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind == "default" and not scaling:
        return {"task.position": "rotary", "task.position.max_timescale": base}
    names, defaults = _SCALED.get(kind, ({"": ""}, {}))
    # A scale of 0 is as none.
    scaling = {k: x for k, x in scaling.items() if x is not None and (k, x) != ("mscale", 0)}
    both = [bool(scaling.get(key)) for key in ("mscale", "mscale_all_dim")]
    if {**defaults, **scaling}.keys() != names.keys() or both not in ([scales] * 2, [False] * 2):
        raise WeightsError(f"{where}: rope_scaling={kind!r} with {scaling} cannot be represented")
    values = {f"task.position.{names[key]}": v for key, v in {**defaults, **scaling}.items()}
    return {"task.position": kind, "task.position.max_timescale": base, **values}


def rotary_keys(position: Params) -> dict[str, Any]:
    """The keys of positions: the inverse of rotary."""
    if "max_timescale" not in position:
        return {}
    base = {"rope_theta": position.max_timescale}
    for kind, (names, _) in _SCALED.items():
        if all(name in position for name in names.values()):
            values = {key: position.Get(name) for key, name in names.items()}
            if not values.get("mscale_all_dim") and values.get("mscale") == 1.0:
                values = {key: value for key, value in values.items() if "mscale" not in key}
            return {**base, "rope_scaling": {"rope_type": kind, **values}}
    return base
