"""DeepSeek-V2, DeepSeek-V3 and Kimi K2: latent attention, shared experts, dense first layers, experts in groups, and a
head for the token after the next one.

Letters of layouts beside those of family.py: r the rank of keys and values, q that of queries, w a value, t a pair of
numbers that positions turn; files have the two side by side, here they are half of all such numbers apart.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers import positions
from lingvo_moe.core.layers.latent_attention import LatentAttention
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.core.weights.source import WeightsError, WeightSource
from lingvo_moe.tasks.families.family import HEAD, TABLE, Default, gate_keys, gates, number

from . import llama
from .open_models import OpenModel, with_experts


class DeepSeek(OpenModel):
    """The parts of DeepSeek-V2 and V3, and Kimi K2: latent attention, shared experts, dense first layers."""

    EPSILON = 1e-6
    HEADS = 128
    QUERY_RANK = 1536
    MSCALE = 1.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(num_heads=self.HEADS, key_dim=128)
        p.attention = LatentAttention.Params().Set(rank=512, query_rank=self.QUERY_RANK)
        p.position = positions.YarnRotary.Params().Set(
            max_timescale=self.BASE,
            factor=40.0,
            original_length=4096,
            mscale=self.MSCALE,
            mscale_all=self.MSCALE,
        )
        return p


@registry.Register
class DeepSeekV2Lite(DeepSeek):
    """DeepSeek-V2-Lite (2024): 15,706,484,224 parameters, 2,661,150,208 of them active."""

    HEADS, QUERY_RANK, MSCALE = 16, 0, 0.707

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=102400, model_dim=2048, hidden_dim=10944, num_layers=27)
        with_experts(p, 64, 1408, k=6, normalize_gates="never")
        p.moe.num_shared_experts = 2
        return p.Set(dense_first_layers=1)


class SigmoidRouted(DeepSeek):
    """Experts chosen by sigmoid scores and a bias that balances them; a loss by row of weight 0.0001 (V3's report)."""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(model_dim=7168, hidden_dim=18432, num_layers=61)

    def Experts(self, p: InstantiableParams, num: int, **router: object) -> InstantiableParams:
        """The task with so many experts of 2048, 8 of which a token visits, and a shared one."""
        with_experts(p, num, 2048, k=8, gate="sigmoid", balance_bias=0.001, **router)
        p.moe.num_shared_experts = 1
        return p.Set(aux_loss_weight=1e-4)


@registry.Register
class DeepSeekV3(SigmoidRouted):
    """DeepSeek-V3 (2024): 671,026,419,200 parameters, 37,552,297,472 of them active, balance biases included.

    Its head for the token after the next, `task.multi_token_weight=0.3`, has 11,610,068,224 more.
    """

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=129280)
        groups = {"expert_groups": 8, "groups_per_token": 4}
        return self.Experts(p, 256, gate_scale=2.5, **groups).Set(dense_first_layers=3)


@registry.Register
class KimiK2(SigmoidRouted):
    """Kimi K2 (2025): 1,026,408,232,448 parameters, 32,861,500,928 of them active."""

    HEADS, BASE = 64, 50000.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=163840)
        p.position.Set(factor=32.0, fast_turns=1.0)
        return self.Experts(p, 384, gate_scale=2.827).Set(dense_first_layers=1)


# --- the files of published weights

_LAYER = "model.layers.{layer}."
_ATTENTION, _SHARED = (f"{_LAYER}{part}." for part in ("self_attn", "mlp.shared_experts"))
_HEADS = "(n (k + t two))"  # of queries
# Of models whose queries have no rank, and of others.
_PLAIN_QUERIES = (
    WeightRule(f"{_ATTENTION}q_proj.weight", f"{_HEADS} m", "self_atten.q", "m n (k + two t)"),
)
_QUERIES = (
    WeightRule(f"{_ATTENTION}q_a_proj.weight", "q m", "self_atten.q_down", "m q"),
    WeightRule(f"{_ATTENTION}q_a_layernorm.weight", "q", "self_atten.q_norm", "q"),
    WeightRule(f"{_ATTENTION}q_b_proj.weight", f"{_HEADS} q", "self_atten.q", "q n (k + two t)"),
)
_OF_LAYER = (
    WeightRule(
        f"{_ATTENTION}kv_a_proj_with_mqa.weight",
        "(r + t two) m",
        "self_atten.down",
        "m (r + two t)",
    ),
    WeightRule(f"{_ATTENTION}kv_a_layernorm.weight", "r", "self_atten.norm", "r"),
    WeightRule(f"{_ATTENTION}kv_b_proj.weight", "(n (k + w)) r", "self_atten.k", "r n k"),
    WeightRule(f"{_ATTENTION}kv_b_proj.weight", "(n (k + w)) r", "self_atten.v", "r n w"),
    WeightRule(f"{_ATTENTION}o_proj.weight", "m (n w)", "self_atten.o", "n w m"),
    *llama.NORMS,
    *llama.FEED_FORWARD,
    *llama.EXPERTS,
    WeightRule(f"{_LAYER}mlp.gate.e_score_correction_bias", "e", "ffn.router.balance_bias", "e"),
    WeightRule(f"{_SHARED}gate_proj.weight", "s m", "ffn.shared_experts.wi_gate", "m s"),
    WeightRule(f"{_SHARED}up_proj.weight", "s m", "ffn.shared_experts.wi", "m s"),
    WeightRule(f"{_SHARED}down_proj.weight", "m s", "ffn.shared_experts.wo", "s m"),
)
# Of the head for the token after the next one, beside its layer; j is m, of the input.
_JOINT = f"{_LAYER}eh_proj.weight"
_HEAD = (
    WeightRule(f"{_LAYER}enorm.weight", "m", "token_norm.scale", "m"),
    WeightRule(f"{_LAYER}hnorm.weight", "m", "hidden_norm.scale", "m"),
    WeightRule(_JOINT, "m (first j + second j)", "of_token", "(first j) m"),
    WeightRule(_JOINT, "m (first j + second j)", "of_hidden", "(second j) m"),
    WeightRule(f"{_LAYER}shared_head.norm.weight", "m", "final_norm.scale", "m"),
)
_KEYS: Mapping[str, tuple[str, Default]] = {
    **{name: key for name, key in llama.KEYS.items() if name != "task.num_kv_heads"},
    "task.vocab_size": ("vocab_size", 129280),
    "task.model_dim": ("hidden_size", 7168),
    "task.hidden_dim": ("intermediate_size", 18432),
    "task.num_layers": ("num_hidden_layers", 61),
    "task.num_heads": ("num_attention_heads", 128),
    "task.key_dim": ("qk_nope_head_dim", 128),
    "task.attention.turned_dim": ("qk_rope_head_dim", 64),
    "task.attention.value_dim": ("v_head_dim", 128),
    "task.attention.rank": ("kv_lora_rank", 512),
    "task.expert_hidden_dim": ("moe_intermediate_size", 2048),
    "task.num_experts": ("n_routed_experts", 256),
    "task.moe.num_shared_experts": ("n_shared_experts", 1),
    "task.moe.router.k": ("num_experts_per_tok", 8),
    "task.moe.router.gate_scale": ("routed_scaling_factor", 2.5),
    "task.dense_first_layers": ("first_k_dense_replace", 3),
}
# The weight of the head's loss in the report on V3; the key of its layers, as published and as `transformers` has it.
_HEAD_WEIGHT, _HEAD_KEYS = 0.3, ("num_nextn_predict_layers", "num_mtp_layers")


class DeepSeekV3Family(llama.LlamaFamily):
    """V3 and Kimi K2: experts by sigmoid and a bias, in the groups whose two best have the largest sums."""

    TYPES: ClassVar[tuple[str, ...]] = ("deepseek_v3", "kimi_k2")
    ARCHITECTURE: ClassVar[str] = "DeepseekV3ForCausalLM"
    EXPERIMENT: ClassVar[str] = "lm.DeepSeekV3"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = _KEYS
    ALWAYS: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    OTHER_KEYS: ClassVar[Sequence[str]] = (
        *llama.LlamaFamily.OTHER_KEYS,
        *("q_lora_rank", "n_group", "topk_group", "norm_topk_prob", *_HEAD_KEYS),
        *("num_key_value_heads", "head_dim", "qk_head_dim"),  # which follow from others
        *("auto_map", "aux_loss_alpha", "seq_aux", "ep_size"),  # which say nothing here
    )
    GROUPS: ClassVar[tuple[int, int]] = (
        8,
        4,
    )  # all groups and those of a token, where no key says it

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        heads = config.get("num_attention_heads")
        head = (config.get("qk_nope_head_dim", 128), config.get("qk_rope_head_dim", 64))
        derived = {"num_key_value_heads": heads, "head_dim": head[1], "qk_head_dim": sum(head)}
        for key, value in derived.items():
            if config.get(key, value) not in (None, value):
                raise WeightsError(f"{where}: {key}={config[key]!r}; latent attention has {value}")
        rank = config.get("q_lora_rank", 1536) or 0
        return {
            "task.attention.query_rank": number({}, "q_lora_rank", rank, where),
            **llama.rotary(config, where, self.BASE, scales=True),
            **self.Router(config, where),
        }

    def Router(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The parameters of the router."""
        return gates({"norm_topk_prob": True, **config}, where) | self._Groups(config, where)

    def _Groups(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        groups, chosen = (
            number(config, key, default, where)
            for key, default in zip(("n_group", "topk_group"), self.GROUPS, strict=True)
        )
        values = {"task.moe.router.expert_groups": groups}
        return values | ({"task.moe.router.groups_per_token": chosen} if groups != 1 else {})

    def OtherKeys(self, p: Params) -> dict[str, Any]:
        keys = super().OtherKeys(p)
        if "query_rank" not in p.attention or "expert_groups" not in p.moe.router:
            return keys  # of no model of this family
        return {
            **keys,
            "q_lora_rank": p.attention.query_rank or None,
            "num_key_value_heads": p.num_heads,
            _HEAD_KEYS[0]: int(p.multi_token_weight > 0),
            **self.RouterKeys(p),
        }

    def RouterKeys(self, p: Params) -> dict[str, Any]:
        """The keys of the router: the inverse of Router."""
        router = p.moe.router
        groups = {"n_group": router.expert_groups, "topk_group": router.groups_per_token}
        return gate_keys(p) | groups

    def FromTensors(self, config: Mapping[str, Any], source: WeightSource) -> dict[str, Any]:
        """Whether there is a head for the token after the next one; for others it has no place."""
        layers = _heads(source)
        return {"task.multi_token_weight": _HEAD_WEIGHT} if len(layers) == 1 else {}

    def Sizes(self, p: Params) -> dict[str, int]:
        return {
            **super().Sizes(p),
            "r": p.attention.rank,
            "q": p.attention.query_rank,
            "w": p.attention.value_dim,
            "t": p.attention.turned_dim // 2,
            "j": p.model_dim,
        }

    def Rules(self, p: Params) -> Sequence[WeightRule]:
        queries = _QUERIES if p.attention.query_rank else _PLAIN_QUERIES
        of_layer = (*queries, *_OF_LAYER)
        of_head = [
            dataclasses.replace(rule, variable=f"layer.{rule.variable}")
            for rule in of_layer
            if "{layer}" in rule.tensor
        ]
        return (*llama.TABLES, *of_layer, *_HEAD, *of_head)

    def Copies(self, p: Params) -> Mapping[str, str]:
        if not p.multi_token_weight:
            return {}
        head = TABLE if p.tied_softmax else HEAD
        layer = _LAYER.format(layer=p.num_layers)
        of_head = {"embed_tokens.weight": TABLE, "shared_head.head.weight": head}
        return {layer + name: other for name, other in of_head.items()}

    def LeftOut(self, p: Params, source: WeightSource) -> list[str]:
        others = (
            [] if p.multi_token_weight else [f"{_LAYER.format(layer=n)}.*" for n in _heads(source)]
        )
        return [*super().LeftOut(p, source), *others]


class DeepSeekV2Family(DeepSeekV3Family):
    """V2: experts by softmax, whose gates need not sum to one, in the groups whose best one has the highest gate."""

    TYPES: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    ARCHITECTURE: ClassVar[str] = "DeepseekV2ForCausalLM"
    EXPERIMENT: ClassVar[str] = "lm.DeepSeekV2Lite"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **_KEYS,
        "task.vocab_size": ("vocab_size", 102400),
        "task.model_dim": ("hidden_size", 4096),
        "task.hidden_dim": ("intermediate_size", 11008),
        "task.num_layers": ("num_hidden_layers", 32),
        "task.num_heads": ("num_attention_heads", 32),
        "task.expert_hidden_dim": ("moe_intermediate_size", 1407),
        "task.num_experts": ("n_routed_experts", 64),
        "task.moe.num_shared_experts": ("n_shared_experts", 2),
        "task.moe.router.k": ("num_experts_per_tok", 6),
        "task.moe.router.gate_scale": ("routed_scaling_factor", 1.0),
        "task.dense_first_layers": ("first_k_dense_replace", 0),
    }
    ALWAYS: ClassVar[Mapping[str, Any]] = {
        **{k: v for k, v in DeepSeekV3Family.ALWAYS.items() if k != "topk_method"},
        "scoring_func": "softmax",
        # `transformers` does not look at it, the authors' code then leaves out the factor.
        "norm_topk_prob": False,
        "mlp_bias": False,
    }
    OTHER_KEYS: ClassVar[Sequence[str]] = (*DeepSeekV3Family.OTHER_KEYS, "topk_method")
    GROUPS: ClassVar[tuple[int, int]] = (1, 1)

    def Router(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        method = config.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise WeightsError(
                f"{where}: topk_method={method!r} cannot be represented; expected greedy or group_limited_greedy"
            )
        values = {} if method == "greedy" else self._Groups(config, where)
        return values | ({"task.moe.router.group_score": "best"} if len(values) > 1 else {})

    def RouterKeys(self, p: Params) -> dict[str, Any]:
        grouped = p.moe.router.expert_groups > 1
        keys = super().RouterKeys(p) | {
            "topk_method": "group_limited_greedy" if grouped else "greedy"
        }
        return {**keys, "norm_topk_prob": False}


def _heads(source: WeightSource) -> list[int]:
    """The numbers of the layers that are heads for later tokens."""
    form = re.escape(_JOINT).replace(r"\{layer\}", r"(\d+)")
    return [int(match[1]) for name in source.entries if (match := re.fullmatch(form, name))]
