"""The dispatchers by name: what `MoELayer.Params().dispatcher` may be."""

from lingvo_moe.core.hyperparams import InstantiableParams
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


def dispatcher_params(chosen: str | InstantiableParams) -> InstantiableParams:
    """The Params that a name in DISPATCHERS stands for; Params stand for themselves."""
    return DISPATCHERS[chosen].Params() if isinstance(chosen, str) else chosen
