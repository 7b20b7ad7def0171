"""Mistral, Llama with a window, and Mixtral: experts, of which each token visits those with the highest gates."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.core.weights.source import WeightsError
from lingvo_moe.tasks.families.family import Default

from . import llama
from .open_models import OpenModel, with_experts


@registry.Register
class Mistral7B(OpenModel):
    """7,241,732,096 parameters. A query looks at 4096 tokens."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=32000, model_dim=4096, hidden_dim=14336, num_layers=32)
        p.attention = ExtendedAttention.Params().Set(window=4096)
        return p.Set(num_heads=32, num_kv_heads=8)


class Mixtral(OpenModel):
    """Mixtral of experts (Jiang et al. 2024): two of 8 experts, gates that sum to one."""

    BASE = 1000000.0


@registry.Register
class Mixtral8x7B(Mixtral):
    """46,702,792,704 parameters, 12,879,925,248 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=32000, model_dim=4096, hidden_dim=14336, num_layers=32)
        with_experts(p, 8, 14336, k=2)
        return p.Set(num_heads=32, num_kv_heads=8)


@registry.Register
class Mixtral8x22B(Mixtral):
    """140,630,071,296 parameters, 39,161,468,928 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=32768, model_dim=6144, hidden_dim=16384, num_layers=56)
        with_experts(p, 8, 16384, k=2)
        return p.Set(num_heads=48, num_kv_heads=8)


@registry.Register
class ImportedMixtral(Mixtral8x7B):
    """Mixtral of any size, which a checkpoint says."""


# --- the files of published weights

_EXPERTS = "model.layers.{layer}.block_sparse_moe."
_EXPERT = f"{_EXPERTS}experts.{{expert}}."


class MistralFamily(llama.LlamaFamily):
    """See the module.

    Attributes:
        WINDOW: how many tokens a query looks at, where config.json does not say it; None: all.
    """

    TYPES: ClassVar[tuple[str, ...]] = ("mistral",)
    ARCHITECTURE: ClassVar[str] = "MistralForCausalLM"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **llama.KEYS,
        "task.hidden_dim": ("intermediate_size", 14336),
        "task.num_kv_heads": ("num_key_value_heads", 8),
    }
    WINDOW: ClassVar[int | None] = 4096
    OTHER_KEYS: ClassVar[Sequence[str]] = (*llama.LlamaFamily.OTHER_KEYS, "sliding_window")

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        window = config.get("sliding_window", self.WINDOW)
        if window is not None and not (isinstance(window, int) and window > 0):
            raise WeightsError(f"{where}: sliding_window={window!r}; expected a number of tokens")
        windowed = {"task.attention": "extended", "task.attention.window": window}
        return super().Others(config, where) | (windowed if window is not None else {})

    def OtherKeys(self, p: Params) -> dict[str, Any]:
        window = p.attention.window if "window" in p.attention else None
        return {**super().OtherKeys(p), "sliding_window": window or None}


class MixtralFamily(MistralFamily):
    """See the module."""

    TYPES: ClassVar[tuple[str, ...]] = ("mixtral",)
    ARCHITECTURE: ClassVar[str] = "MixtralForCausalLM"
    EXPERIMENT: ClassVar[str] = "lm.ImportedMixtral"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **MistralFamily.KEYS,
        "task.norm.epsilon": ("rms_norm_eps", 1e-5),
        "task.expert_hidden_dim": ("intermediate_size", 14336),
        "task.num_experts": ("num_local_experts", 8),
        "task.moe.router.k": ("num_experts_per_tok", 2),
    }
    BASE: ClassVar[float] = 1e6
    WINDOW: ClassVar[int | None] = None
    RULES: ClassVar[Sequence[WeightRule]] = (
        *llama.TABLES,
        *llama.ATTENTION,
        *llama.NORMS,
        WeightRule(f"{_EXPERTS}gate.weight", "e m", "ffn.router.wg", "m e"),
        WeightRule(f"{_EXPERT}w1.weight", "f m", "ffn.experts.wi_gate", "m f"),
        WeightRule(f"{_EXPERT}w3.weight", "f m", "ffn.experts.wi", "m f"),
        WeightRule(f"{_EXPERT}w2.weight", "m f", "ffn.experts.wo", "f m"),
    )
