"""A GGUF by llama.cpp with the names and layouts of the other files of Llama's family, and its tokenizer."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_moe.core.weights.gguf_file import GgufFile
from lingvo_moe.core.weights.layout import rearranged
from lingvo_moe.core.weights.source import WeightsError, WeightSource
from lingvo_moe.tasks.families.family import HEAD, TABLE

_TABLES = {
    "token_embd.weight": TABLE,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_LAYER = {
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
_KEYS = {
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
# Further keys: those that are the size of a head, and others with the values that change nothing.
_HEAD_SIZES = ("rope.dimension_count", "attention.key_length", "attention.value_length")
_USUAL = {"rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0}


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
        keys = {key: f"llama.{name}" for key, name in _KEYS.items()}
        if missing := [name for name in keys.values() if name not in file.metadata]:
            raise WeightsError(f"{file.where}: lacks {', '.join(missing)}")
        self.config = {key: file.metadata[name] for key, name in keys.items()}
        sizes = [self.config[key] for key in ("hidden_size", "num_attention_heads")]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise WeightsError(f"{file.where}: has the sizes {sizes}; expected positive integers")
        usual = {**_USUAL, **dict.fromkeys(_HEAD_SIZES, sizes[0] // sizes[1])}
        for name, value in file.metadata.items():
            part = name.removeprefix("llama.")
            is_other = part != name and part not in _KEYS.values()
            if is_other and value != usual.get(part, ...):
                raise WeightsError(
                    f"{file.where}: {name}={value!r} cannot be represented"
                    + (f"; expected {usual[part]!r}" if part in usual else "")
                )
        epsilon = np.float32(self.config["rms_norm_eps"])
        self.config |= {
            "model_type": "llama",
            "rms_norm_eps": float(str(epsilon)),  # 1e-05, not what float32 makes of it
            "tie_word_embeddings": HEAD not in self.entries,
        }

    def Read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        self.About(name)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        if (key := next((key for key in heads if key in name), None)) is None:
            return self._file.Read(self._name_of[name], rows)
        values = self._file.Read(self._name_of[name])
        sizes = {"n": self.config[heads[key]], "two": 2, "m": values.shape[1]}
        sizes["i"] = values.shape[0] // (2 * sizes["n"])
        return rearranged(values, "(n i two) m", "(n two i) m", sizes)[rows]


def _published(name: str, where: str) -> str:
    """The name of a GGUF's tensor in the family's other files."""
    if name in _TABLES:
        return _TABLES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if not match or match[2] not in _LAYER:
        raise WeightsError(f"{where}: {name} is no tensor of this family")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


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
    lists = ("tokens", "token_type", "merges")
    if missing := [key for key in lists if not isinstance(about.get(key), list)]:
        raise WeightsError(f"{file.where}: lacks the list tokenizer.ggml.{missing[0]}")
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
        if i is not None and (type(i) is not int or i not in vocabulary):
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
