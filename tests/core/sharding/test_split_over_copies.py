"""The dimensions of a tensor that are sharded instead of copied."""

import pytest

from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import split_over_copies


@pytest.mark.parametrize("shape, split, free, expected", [
    ((64, 8), (None, None), (0, 1), (("data", "expert"), None)),  # both divide the first one
    ((4, 4), (None, None), (0, 1), ("expert", "data")),  # the larger axis first
    ((6, 5), (None, None), (0, 1), ("data", None)),  # nothing divides by 4
    ((5, 7), (None, None), (0, 1), (None, None)),
    ((8, 64, 8), ("expert", None, None), (0, 1, 2), ("expert", "data", None)),  # a whole one
    ((8, 5, 7), ("expert", None, None), (0, 1, 2), (("expert", "data"), None, None)),
    ((4, 3, 6), ("expert", None, None), (0, 1, 2), ("expert", None, "data")),
    ((64, 8), (None, None), (1,), (None, ("data", "expert"))),  # a stack of 64 layers
    ((64, 8), (None, None), (), (None, None)),
    ((64,), (("data", "expert"),), (0,), (("data", "expert"),)),
])  # fmt: skip
def test_the_axes_that_would_hold_copies_shard_what_they_divide(shape, split, free, expected):
    mesh = Mesh.parse("data:2,expert:4,one:1")
    assert split_over_copies(shape, split, free, mesh) == expected
