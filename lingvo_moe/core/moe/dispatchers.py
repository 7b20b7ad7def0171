"""The dispatchers by name: what `MoELayer.Params().dispatcher` may be."""

from lingvo_moe.core.hyperparams import InstantiableParams
from lingvo_moe.core.moe.dispatch import Dispatcher, EinsumDispatcher
from lingvo_moe.core.moe.dispatch_dropless import DroplessDispatcher
from lingvo_moe.core.moe.dispatch_index import IndexDispatcher
from lingvo_moe.core.moe.dispatch_masked import MaskedDispatcher
from lingvo_moe.core.suggest import did_you_mean

DISPATCHERS: dict[str, type[Dispatcher]] = {
    "einsum": EinsumDispatcher,
    "index": IndexDispatcher,
    "dropless": DroplessDispatcher,
    "masked": MaskedDispatcher,
}


def dispatcher_params(where: str, chosen: str | InstantiableParams) -> InstantiableParams:
    """The Params that a name stands for; Params stand for themselves.

    Raises:
        ValueError: no dispatcher has that name.
    """
    if isinstance(chosen, InstantiableParams):
        return chosen
    if chosen not in DISPATCHERS:
        raise ValueError(
            f"{where}={chosen!r}: known are {', '.join(sorted(DISPATCHERS))}"
            f"{did_you_mean(chosen, DISPATCHERS)}"
        )
    return DISPATCHERS[chosen].Params()
