"""Mixtral: Llama's layers with experts, of which each token visits those with the highest gates."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.tasks.families import llama
from lingvo_moe.tasks.families.family import Default

_EXPERTS = "model.layers.{layer}.block_sparse_moe."
_EXPERT = f"{_EXPERTS}experts.{{expert}}."


class MixtralFamily(llama.LlamaFamily):
    """See the module."""

    TYPES: ClassVar[tuple[str, ...]] = ("mixtral",)
    EXPERIMENT: ClassVar[str] = "lm.ImportedMixtral"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **llama.KEYS,
        "task.expert_hidden_dim": ("intermediate_size", 14336),
        "task.num_experts": ("num_local_experts", 8),
        "task.moe.router.k": ("num_experts_per_tok", 2),
    }
    RULES: ClassVar[Sequence[WeightRule]] = (
        *llama.TABLES,
        *llama.ATTENTION,
        *llama.NORMS,
        WeightRule(f"{_EXPERTS}gate.weight", "e m", "ffn.router.wg", "m e"),
        WeightRule(f"{_EXPERT}w1.weight", "f m", "ffn.experts.wi_gate", "m f"),
        WeightRule(f"{_EXPERT}w3.weight", "f m", "ffn.experts.wi", "m f"),
        WeightRule(f"{_EXPERT}w2.weight", "m f", "ffn.experts.wo", "f m"),
    )
