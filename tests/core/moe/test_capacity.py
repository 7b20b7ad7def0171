"""Expert capacity: rounding, limits, errors."""

import pytest

from lingvo_moe.core.moe.routers.slots import expert_capacity


@pytest.mark.parametrize(("group_size", "num_experts", "factor", "minimum", "expected"), [
    (1024, 8, 2.0, 4, 256),  # 2 S / E, exactly
    (100, 8, 2.0, 4, 25),
    (101, 8, 2.0, 4, 26),  # 25.25 up
    (2048, 2048, 2.0, 4, 4),  # 2, raised to the minimum: effective factor 4
    (2048, 2048, 2.0, 1, 2),
    (10, 1, 1.1, 1, 10),  # never more than S
    (10, 2, 1.0, 1, 5),
    (20, 2, 1.1, 1, 11),  # 1.1 * 10 is 11.000000000000002 in floating point
    (3, 8, 2.0, 4, 3),
])  # fmt: skip
def test_by_hand(group_size, num_experts, factor, minimum, expected):
    assert expert_capacity(group_size, num_experts, factor, minimum) == expected


@pytest.mark.parametrize("name", ["group_size", "num_experts", "capacity_factor", "min_capacity"])
def test_errors_name_the_argument(name):
    args = {"group_size": 8, "num_experts": 4, "capacity_factor": 2.0, "min_capacity": 4}
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        expert_capacity(**{**args, name: 0})
