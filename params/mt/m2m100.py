"""M2M-100 (Fan et al. 2020) and NLLB-200 (NLLB Team 2022) without experts: encoder and decoder with biases, sinusoids,
and one table of embeddings.

Sizes, biases and positions are those of their configurations; a test counts parameters to the unit. Ours: optimizer,
batches and split maps. An imported checkpoint (docs/importing.md) is one of these, with the sizes of its own.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.core.weights.source import WeightsError, WeightSource, same_values
from lingvo_moe.tasks.families.family import HEAD, Default, Family
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.text.vocabulary.language_codes import (
    VOCABULARY_FILES,
    LanguageCodes,
    read_language_codes,
)

_HEADS = 16
_M2M_IDS, _NLLB_IDS = 128112, 256206


class OpenTranslator(registry.Experiment):
    """The parts of all of these models: biases, ReLU, sinusoids from the third row on, one table of embeddings."""

    IDS = _NLLB_IDS
    LAYERS, MODEL_DIM, HIDDEN_DIM = 24, 1024, 8192
    EXPERTS = 0

    def Task(self) -> InstantiableParams:
        inside = {"N": "model", "H": "model", "V": "model"}
        p = MtModel.Params().Set(
            name="translator",
            source_vocab_size=self.IDS,
            target_vocab_size=self.IDS,
            shared_embedding=True,
            use_bias=True,
            num_encoder_layers=self.LAYERS,
            num_decoder_layers=self.LAYERS,
            model_dim=self.MODEL_DIM,
            hidden_dim=self.HIDDEN_DIM,
            num_heads=_HEADS,
            key_dim=self.MODEL_DIM // _HEADS,
            num_experts=self.EXPERTS,
            optimizer=Adam.Params(),
            activation_split={"B": "data", **inside},
            weight_split=inside,
        )
        p.norm.epsilon = 1e-5
        p.position.offset = 2
        return p

    def Input(self) -> InstantiableParams:
        sizes = {"source_vocab_size": self.IDS, "target_vocab_size": self.IDS}
        lengths = {"source_length": 128, "target_length": 128}
        return MtInput.Params().Set(**sizes, **lengths, batch_size=64)

    def Train(self) -> Params:
        rows = "expert" if self.EXPERTS else "data"
        return registry.TrainParams().Set(mesh=f"{rows}:8,model:1", shard_state="weights")


@registry.Register
class M2M100_418M(OpenTranslator):
    """M2M-100 of 12 layers: 483,905,536 parameters, whatever its name says."""

    IDS, LAYERS, HIDDEN_DIM = _M2M_IDS, 12, 4096


@registry.Register
class M2M100_1_2B(OpenTranslator):
    """M2M-100 of 24 layers: 1,239,470,080 parameters."""

    IDS = _M2M_IDS


@registry.Register
class NLLB200Distilled600M(OpenTranslator):
    """NLLB-200, distilled: 615,073,792 parameters."""

    LAYERS, HIDDEN_DIM = 12, 4096


@registry.Register
class NLLB200_1_3B(OpenTranslator):
    """NLLB-200, also the larger distilled one: 1,370,638,336 parameters."""


@registry.Register
class NLLB200_3_3B(OpenTranslator):
    """The largest NLLB-200 without experts: 3,344,863,232 parameters."""

    MODEL_DIM = 2048


# --- files

_TABLE = "model.shared.weight"
_EMBEDDINGS = tuple(f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder"))


def _linear(tensor: str, rows: str, columns: str, variable: str, layout: str) -> list[WeightRule]:
    """The rules of a matrix [rows, columns] and its bias; `layout` is that of the variable."""
    bias = " ".join(axis for axis in layout.split() if axis in rows)
    return [
        WeightRule(f"{tensor}.weight", f"{rows} {columns}", variable, layout),
        WeightRule(f"{tensor}.bias", rows, f"{variable}_bias", bias),
    ]


def _norm(tensor: str, variable: str) -> list[WeightRule]:
    pairs = {"weight": "scale", "bias": "bias"}
    return [WeightRule(f"{tensor}.{a}", "m", f"{variable}.{b}", "m") for a, b in pairs.items()]


def _attention(tensor: str, variable: str) -> list[WeightRule]:
    heads = [
        rule
        for x in "qkv"
        for rule in _linear(f"{tensor}.{x}_proj", "(n k)", "m", f"{variable}.{x}", "m n k")
    ]
    return heads + _linear(f"{tensor}.out_proj", "m", "(n k)", f"{variable}.o", "n k m")


def feed_forward(tensor: str, hidden: str, variable: str) -> list[WeightRule]:
    """The rules of two products; `hidden` is the letter of the width between them."""
    return [
        *_linear(f"{tensor}fc1", hidden, "m", f"{variable}.wi", f"m {hidden}"),
        *_linear(f"{tensor}fc2", "m", hidden, f"{variable}.wo", f"{hidden} m"),
    ]


def rules(stack: str, cross: str, norm: str, products: str) -> list[WeightRule]:
    """The rules of a stack, by the names of cross-attention, and of norm and products of feed-forward layers."""
    layer = f"model.{stack}.layers.{{{stack}}}."
    parts = _attention(f"{layer}self_attn", "self_atten")
    parts += _norm(f"{layer}self_attn_layer_norm", "self_norm")
    if stack == "decoder":
        parts += _attention(f"{layer}{cross}", "cross_atten")
        parts += _norm(f"{layer}{cross}_layer_norm", "cross_norm")
    parts += _norm(f"{layer}{norm}", "ffn_norm") + feed_forward(f"{layer}{products}", "h", "ffn")
    return parts + _norm(f"model.{stack}.layer_norm", f"{stack}.final_norm")


TABLES = (
    WeightRule(_TABLE, "v m", "embedding.table", "v m"),
    WeightRule(HEAD, "v m", "softmax.table", "v m"),
)
# Both stacks have these, and the model one for both.
_OF_STACKS = {"ffn_dim": 4096, "attention_heads": 16}


class M2M100Family(Family):
    """See the module."""

    TYPES: ClassVar[tuple[str, ...]] = ("m2m_100",)
    EXPERIMENT: ClassVar[str] = "mt.NLLB200Distilled600M"
    ARCHITECTURE: ClassVar[str] = "M2M100ForConditionalGeneration"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        "task.source_vocab_size": ("vocab_size", 128112),
        "task.target_vocab_size": ("vocab_size", 128112),
        "task.model_dim": ("d_model", 1024),
        "task.hidden_dim": ("encoder_ffn_dim", _OF_STACKS["ffn_dim"]),
        "task.num_encoder_layers": ("encoder_layers", 12),
        "task.num_decoder_layers": ("decoder_layers", 12),
        "task.num_heads": ("encoder_attention_heads", _OF_STACKS["attention_heads"]),
        "task.key_dim": ("head_dim", lambda v: v["task.model_dim"] // (v["task.num_heads"] or 1)),
        "task.tied_softmax": ("tie_word_embeddings", True),
    }
    ALWAYS: ClassVar[Mapping[str, Any]] = {"activation_function": "relu"}
    # The first line of these has an effect; the others say how it was trained, or how others search.
    OTHER_KEYS: ClassVar[Sequence[str]] = (
        *(
            "scale_embedding",
            "decoder_ffn_dim",
            "decoder_attention_heads",
            "decoder_start_token_id",
        ),
        *("dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std"),
        *("num_hidden_layers", "is_encoder_decoder", "gradient_checkpointing", "tokenizer_class"),
        *("forced_bos_token_id", "max_length", "num_beams", "early_stopping"),
    )
    RULES: ClassVar[Sequence[WeightRule]] = (
        *TABLES,
        *rules("encoder", "", "final_layer_norm", ""),
        *rules("decoder", "encoder_attn", "final_layer_norm", ""),
    )
    TABLE: ClassVar[str] = _TABLE
    VOCAB_SIZES: ClassVar[Sequence[str]] = ("input.source_vocab_size", "input.target_vocab_size")
    FILES: ClassVar[Sequence[str]] = VOCABULARY_FILES
    # Copies of the table, the sinusoids, and fairseq's marks.
    LEFT_OUT: ClassVar[Sequence[str]] = (
        r"lm_head\.weight",
        r"model\.(encoder|decoder)\.(embed_tokens\.weight|embed_positions\.weights|version)",
    )

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        for key, default in _OF_STACKS.items():
            one, other = (config.get(f"{stack}_{key}", default) for stack in ("encoder", "decoder"))
            if one != other:
                raise WeightsError(
                    f"{where}: decoder_{key}={other!r} cannot be represented; encoder_{key} is {one!r}"
                )
        scaled = config.get("scale_embedding", True)
        scale = math.sqrt(config.get("d_model") or 1024) if scaled else 1.0
        return {"task.embedding_scale": scale}

    def OtherKeys(self, p: Params) -> dict[str, Any]:
        return {
            "decoder_ffn_dim": p.hidden_dim,
            "decoder_attention_heads": p.num_heads,
            "scale_embedding": p.embedding_scale != 1.0,
        }

    def Vocabulary(
        self, directory: Path, config: Mapping[str, Any]
    ) -> tuple[bytes, LanguageCodes | None]:
        return read_language_codes(directory, config.get("decoder_start_token_id", 2))

    def Source(self, source: WeightSource) -> WeightSource:
        return _Tables(source)


class _Tables(WeightSource):
    """A source whose embeddings, under one or several of their names, are one table."""

    def __init__(self, source: WeightSource):
        """Raises WeightsError: the tables of encoder and decoder differ."""
        self.where, self.entries, self._source = source.where, dict(source.entries), source
        names = [n for n in (_TABLE, *_EMBEDDINGS, HEAD) if n in source.entries]
        self._name = names[0] if names else _TABLE
        for name in names[1:]:
            if name != HEAD and not same_values(source, name, self._name):
                raise WeightsError(
                    f"{self.where}: {name} differs from {self._name}; expected a copy"
                )
        if names:
            self.entries[_TABLE] = self.entries.pop(self._name)

    def Read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        return self._source.Read(self._name if name == _TABLE else name, rows)
