"""How many tokens of a group an expert takes.

Letters: G group, S token in group, E expert, C capacity slot.
"""

import math


def expert_capacity(
    group_size: int, num_experts: int, capacity_factor: float, min_capacity: int
) -> int:
    """C, the slots that one expert has for the tokens of one group.

    `capacity_factor * S / E`, rounded up, at least `min_capacity`, at most S. With a factor of 2 this
    is the paper's 2N / (G E) (section 2.2): as many slots as there are first and second choices.
    Rounding up never gives less than was asked for. Lingvo rounds the quotient down and then up to a
    multiple of four. More than S slots could never fill, since a token takes at most one of them.

    Args:
        group_size: S.
        num_experts: E.
        capacity_factor: slots a token, over all experts; 2.0 in the paper.
        min_capacity: the least C: with thousands of experts the quotient reaches 1 or 2, where chance
            alone overflows an expert. See `effective_capacity_factor` for what that costs.

    Raises:
        ValueError: a size, factor or minimum that is not positive.
    """
    for name, value in (
        ("group_size", group_size),
        ("num_experts", num_experts),
        ("capacity_factor", capacity_factor),
        ("min_capacity", min_capacity),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    wanted = capacity_factor * group_size / num_experts
    rounded_up = math.ceil(wanted - 1e-9)  # 1.1 * 10 is a little above 11 in floating point
    return min(max(rounded_up, min_capacity), group_size)


def effective_capacity_factor(group_size: int, num_experts: int, capacity: int) -> float:
    """E C / S: the capacity factor after rounding, which is what the experts' compute is paid by."""
    return num_experts * capacity / group_size
