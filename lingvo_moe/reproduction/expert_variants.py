"""The variants of mt.M4Experts that tools.compare_experts trains.

A token's feed-forward layers cost 4 M H multiplications and additions in each, H = 256 altogether: two experts
of 128, one of 256, or sixteen of 16.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One model of the comparison.

    Attributes:
        group: 'experts' (more and more of them) or 'routers' (at 16 experts), or both, space-separated.
        experts: E; 1 for the dense model.
        says: what it is, in a few words.
        override: as --model_params_override.
    """

    group: str
    experts: int
    says: str
    override: str = ""


def _top2(experts: int, group: str = "experts") -> Variant:
    return Variant(group, experts, f"top-2 of {experts}, H = 128", f"task.num_experts={experts}")


def _router(says: str, *settings: str) -> Variant:
    parts = [s if s.startswith("task.") else f"task.moe.router.{s}" for s in settings]
    return Variant("routers", 16, says, ";".join(parts))


VARIANTS: dict[str, Variant] = {
    "dense": Variant("experts routers", 1, "dense, H = 256", "task.num_experts=0"),
    "top2_e4": _top2(4),
    "top2_e16": _top2(16, "experts routers"),
    "top2_e64": _top2(64),
}
