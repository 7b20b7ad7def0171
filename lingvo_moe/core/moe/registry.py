"""Routers and dispatchers by the names that parameters may have; a class is imported when it is asked for."""

from lingvo_moe.core.config.class_names import ClassesByName
from lingvo_moe.core.config.hyperparams import InstantiableParams

_ROUTERS = "lingvo_moe.core.moe.routers"
_MOE = "lingvo_moe.core.moe"

ROUTERS = ClassesByName(
    {
        "top2": f"{_ROUTERS}.top2.Top2Router",
        "top_k": f"{_ROUTERS}.top_k.TopKRouter",
        "noisy_top_k": f"{_ROUTERS}.noisy_top_k.NoisyTopKRouter",
        "expert_choice": f"{_ROUTERS}.expert_choice.ExpertChoiceRouter",
        "hash": f"{_ROUTERS}.hash.HashRouter",
        "lsh": f"{_ROUTERS}.lsh.LshRouter",
        "random": f"{_ROUTERS}.random.RandomRouter",
        "soft": f"{_ROUTERS}.soft.SoftRouter",
    }
)

DISPATCHERS = ClassesByName(
    {
        "einsum": f"{_MOE}.dispatch.EinsumDispatcher",
        "index": f"{_MOE}.dispatch_index.IndexDispatcher",
        "dropless": f"{_MOE}.dispatch_dropless.DroplessDispatcher",
        "masked": f"{_MOE}.dispatch_masked.MaskedDispatcher",
    }
)


def dispatcher_params(chosen: str | InstantiableParams) -> InstantiableParams:
    """The Params of the dispatcher of a name in DISPATCHERS; Params are returned as they are."""
    return DISPATCHERS[chosen].Params() if isinstance(chosen, str) else chosen  # type: ignore[attr-defined]
