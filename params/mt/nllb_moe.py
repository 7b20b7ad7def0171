"""NLLB-MoE (NLLB Team 2022, section 6): NLLB's layers, with experts in every n-th, two for a token."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.moe.routers.top2 import Top2Router
from lingvo_moe.core.weights.mapping import WeightRule
from lingvo_moe.core.weights.source import WeightsError
from lingvo_moe.tasks.families.family import Default

from . import m2m100


@registry.Register
class NLLBMoE54B(m2m100.NLLB200_3_3B):
    """NLLB-200, two of 128 experts in every fourth layer: 54,500,569,088 parameters, 3,750,785,024 of them active."""

    EXPERTS = 128

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(moe_every=4, num_groups=0)
        p.activation_split = {**p.activation_split, **dict.fromkeys("BGE", "expert")}
        p.weight_split = {**p.weight_split, "E": "expert"}
        router = Top2Router.Params().Set(reading="lingvo", second_expert_policy="all")
        router.normalize_gates = "after_drops"
        p.moe.Set(router=router, output_masking=0.2, dispatcher="dropless")
        return p


# --- files

_NAMES = ("cross_attention", "ff_layer_norm", "ffn.")
_EXPERT = "ffn.experts.expert_{expert}."


def _experts(stack: str) -> list[WeightRule]:
    layer = f"model.{stack}.layers.{{{stack}}}."
    router = WeightRule(f"{layer}ffn.router.classifier.weight", "e m", "ffn.router.wg", "m e")
    return [router, *m2m100.feed_forward(f"{layer}{_EXPERT}", "f", "ffn.experts")]


class NllbMoeFamily(m2m100.M2M100Family):
    """See the module."""

    TYPES: ClassVar[tuple[str, ...]] = ("nllb-moe",)
    EXPERIMENT: ClassVar[str] = "mt.NLLBMoE54B"
    ARCHITECTURE: ClassVar[str] = "NllbMoeForConditionalGeneration"
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]] = {
        **m2m100.M2M100Family.KEYS,
        "task.expert_hidden_dim": ("encoder_ffn_dim", 4096),
        "task.num_experts": ("num_experts", 128),
        "task.moe_every": ("encoder_sparse_step", 4),
        "task.moe.output_masking": ("moe_token_dropout", 0.2),
        "task.moe.router.prioritize_by_gate": ("batch_prioritized_routing", False),
    }
    ALWAYS: ClassVar[Mapping[str, Any]] = {
        **m2m100.M2M100Family.ALWAYS,
        "router_bias": False,
        "router_dtype": "float32",
        "moe_eval_capacity_token_fraction": 1.0,  # no token is dropped in inference
    }
    # The first line of these has an effect.
    OTHER_KEYS: ClassVar[Sequence[str]] = (
        *m2m100.M2M100Family.OTHER_KEYS,
        *("decoder_sparse_step", "second_expert_policy", "normalize_router_prob_before_dropping"),
        *("expert_capacity", "router_ignore_padding_tokens"),
        *("router_z_loss_coef", "router_aux_loss_coef", "router_type"),
    )
    RULES: ClassVar[Sequence[WeightRule]] = (
        *m2m100.TABLES,
        *m2m100.rules("encoder", *_NAMES),
        *m2m100.rules("decoder", *_NAMES),
        *_experts("encoder"),
        *_experts("decoder"),
    )

    def OtherKeys(self, p: Params) -> dict[str, Any]:
        router = p.moe.router
        keys = super().OtherKeys(p) | {"decoder_sparse_step": p.moe_every}
        if "second_expert_policy" in router:
            keys["second_expert_policy"] = router.second_expert_policy
            before = router.normalize_gates == "before_drops"
            keys["normalize_router_prob_before_dropping"] = before
        return keys

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        steps = [config.get(f"{stack}_sparse_step", 4) for stack in ("encoder", "decoder")]
        if steps[0] != steps[1]:
            raise WeightsError(
                f"{where}: decoder_sparse_step={steps[1]!r} cannot be represented; encoder_sparse_step is {steps[0]!r}"
            )
        before = config.get("normalize_router_prob_before_dropping")
        return {
            **super().Others(config, where),
            "task.moe.router.normalize_gates": "before_drops" if before else "after_drops",
            "task.moe.router.second_expert_policy": config.get("second_expert_policy") or "all",
        }
