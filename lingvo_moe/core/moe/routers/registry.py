"""The routers by name: what `MoELayer.Params().router` may be set to in an override."""

from lingvo_moe.core.moe.routers.base import Router
from lingvo_moe.core.moe.routers.expert_choice import ExpertChoiceRouter
from lingvo_moe.core.moe.routers.hash import HashRouter
from lingvo_moe.core.moe.routers.lsh import LshRouter
from lingvo_moe.core.moe.routers.noisy_top_k import NoisyTopKRouter
from lingvo_moe.core.moe.routers.random import RandomRouter
from lingvo_moe.core.moe.routers.soft import SoftRouter
from lingvo_moe.core.moe.routers.top2 import Top2Router
from lingvo_moe.core.moe.routers.top_k import TopKRouter

ROUTERS: dict[str, type[Router]] = {
    "top2": Top2Router,
    "top_k": TopKRouter,
    "noisy_top_k": NoisyTopKRouter,
    "expert_choice": ExpertChoiceRouter,
    "hash": HashRouter,
    "lsh": LshRouter,
    "random": RandomRouter,
    "soft": SoftRouter,
}
