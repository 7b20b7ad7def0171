"""The dispatchers by name: what `MoELayer.Params().dispatcher` may be."""

from lingvo_moe.core.moe.dispatch import Dispatcher, EinsumDispatcher
from lingvo_moe.core.moe.dispatch_dropless import DroplessDispatcher
from lingvo_moe.core.moe.dispatch_index import IndexDispatcher
from lingvo_moe.core.moe.dispatch_masked import MaskedDispatcher

DISPATCHERS: dict[str, type[Dispatcher]] = {
    "einsum": EinsumDispatcher,
    "index": IndexDispatcher,
    "dropless": DroplessDispatcher,
    "masked": MaskedDispatcher,
}
