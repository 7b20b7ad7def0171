"""Llama 2 and 3, SmolLM2: RMS normalization, SwiGLU, rotary positions, heads of keys and values for several of
queries. Files by the `transformers` library, and GGUF by llama.cpp.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.weights.gguf_file import GgufFile
from lingvo_moe.core.weights.layout import rearranged
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.core.weights.source import WeightsError, WeightSource
from lingvo_moe.tasks.families.family import Default, Family

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise WeightsError(f"{where}: rope_scaling={scaling!r}; expected an object")
    scaling = dict(scaling)
    base = scaling.pop("rope_theta", None) or config.get("rope_theta") or base
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind == "default" and not scaling:
        return {"task.position": "rotary", "task.position.max_timescale": base}
    names, defaults = _SCALED.get(kind, ({"": ""}, {}))
    scaling = {key: value for key, value in scaling.items() if value is not None}
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


# --- GGUF

_GGUF_TABLES = {
    "token_embd.weight": TABLE,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_GGUF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
}


class LlamaGguf(WeightSource):
    """A GGUF of the family with the names and layouts of its other files.

    llama.cpp keeps the pairs of numbers that rotary positions turn side by side in queries and keys.
    """

    def __init__(self, file: GgufFile):
        """Raises WeightsError: it is of another family, or lacks a key."""
        self.where, self._file = file.where, file
        if (kind := file.metadata.get("general.architecture")) != "llama":
            raise WeightsError(
                f"{file.where}: a model of the architecture {kind!r}; expected 'llama'"
            )
        self._name_of = {_published(name, file.where): name for name in file.entries}
        self.entries = {new: file.entries[old] for new, old in self._name_of.items()}
        keys = {key: f"llama.{name}" for key, name in _GGUF_KEYS.items()}
        if missing := [name for name in keys.values() if name not in file.metadata]:
            raise WeightsError(f"{file.where}: lacks {', '.join(missing)}")
        self.config = {key: file.metadata[name] for key, name in keys.items()}
        epsilon = np.float32(self.config["rms_norm_eps"])
        self.config |= {
            "model_type": "llama",
            "rms_norm_eps": float(str(epsilon)),  # 1e-05, not what float32 makes of it
            "tie_word_embeddings": HEAD not in self.entries,
        }

    def Read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        self.About(name)
        values = self._file.Read(self._name_of[name])
        for key, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if key in name:
                sizes = {"n": self.config[heads], "two": 2, "m": values.shape[1]}
                sizes["i"] = values.shape[0] // (2 * sizes["n"])
                values = rearranged(values, "(n i two) m", "(n two i) m", sizes)
        return values[rows]


def _published(name: str, where: str) -> str:
    """The name of a GGUF's tensor in the family's other files."""
    if name in _GGUF_TABLES:
        return _GGUF_TABLES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if not match or match[2] not in _GGUF_LAYER:
        raise WeightsError(f"{where}: {name} is no tensor of this family")
    return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.weight"


# How texts are cut before they are split into pieces, by the name that llama.cpp has for it.
_CUTS: Mapping[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "gpt-2": [],
}
_CONTROL = 3  # the type of a token that is no text


def gguf_tokenizer(file: GgufFile) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json, by name, of a GGUF with byte pairs.

    Raises WeightsError: another kind of tokenizer, or metadata that are missing.
    """
    about = {key.removeprefix("tokenizer.ggml."): v for key, v in file.metadata.items()}
    kind, cut = about.get("model"), str(about.get("pre"))
    if kind != "gpt2" or cut not in _CUTS:
        raise WeightsError(
            f"{file.where}: a tokenizer {kind!r} with the cuts {cut!r}; expected 'gpt2' with {', '.join(_CUTS)}"
        )
    if missing := [key for key in ("tokens", "token_type", "merges") if key not in about]:
        raise WeightsError(f"{file.where}: lacks tokenizer.ggml.{missing[0]}")
    tokens, types = about["tokens"], about["token_type"]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    vocabulary = dict(enumerate(tokens))
    special = [i for i, kind in zip(vocabulary, types) if kind == _CONTROL]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": tokens[i], "special": True, **plain} for i in special
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_CUTS[cut], byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": about["merges"],
        },
    }
    marks = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    numbers = {mark: about.get(f"{name}_token_id") for mark, name in marks.items()}
    for mark, i in numbers.items():
        if i is not None and i not in vocabulary:
            raise WeightsError(f"{file.where}: the mark {mark} is token {i} of {len(tokens)}")
    config = {f"{mark}_token": vocabulary[i] for mark, i in numbers.items() if i is not None}
    template = file.metadata.get("tokenizer.chat_template")
    config |= {"chat_template": template} if isinstance(template, str) else {}
    ends = [about.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "eos_token_id": [i for i in ends if type(i) is int],
    }
