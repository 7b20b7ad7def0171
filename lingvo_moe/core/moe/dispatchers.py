"""The dispatchers by name: what `MoELayer.Params().dispatcher` may be."""

from lingvo_moe.core.moe.dispatch import Dispatcher, EinsumDispatcher
from lingvo_moe.core.moe.dispatch_gather import GatherDispatcher

DISPATCHERS: dict[str, type[Dispatcher]] = {"einsum": EinsumDispatcher, "gather": GatherDispatcher}
