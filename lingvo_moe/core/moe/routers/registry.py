"""The routers by name: what `MoELayer.Params().router` may be set to in an override."""

from lingvo_moe.core.moe.routers.base import Router
from lingvo_moe.core.moe.routers.top2 import Top2Router

ROUTERS: dict[str, type[Router]] = {"top2": Top2Router}
