"""The dimensions of a tensor that are sharded instead of copied."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import axes_of, split_over_copies


@pytest.mark.parametrize(
    "shape, split, free, expected",
    [
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
    ],
)
def test_the_axes_that_would_hold_copies_shard_what_they_divide(shape, split, free, expected):
    mesh = Mesh.parse("data:2,expert:4,one:1")
    assert split_over_copies(shape, split, free, mesh) == expected


def test_one_device_holds_everything():
    assert split_over_copies((8,), ("expert",), (0,), Mesh.parse("data:1")) == ("expert",)


@given(
    shape=st.lists(st.sampled_from([1, 3, 4, 6, 16, 48]), min_size=1, max_size=4),
    first=st.sampled_from([None, "a", "b", ("a", "b")]),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3),
)
def test_every_axis_is_used_once_and_divides(shape, first, sizes):
    mesh = Mesh(("a", "b", "c"), sizes)
    given_axes = axes_of(first)
    if shape[0] % math.prod(mesh.axis_size(a) for a in given_axes):
        return
    split = (first, *[None] * (len(shape) - 1))
    found = split_over_copies(tuple(shape), split, range(len(shape)), mesh)
    used = [a for axis in found for a in axes_of(axis)]
    assert len(used) == len(set(used))
    assert all(n % mesh.axis_size(axes_of(axis)) == 0 for n, axis in zip(shape, found))
    assert axes_of(found[0])[: len(given_axes)] == given_axes
    # What still holds copies divides no dimension any more.
    held = [n // mesh.axis_size(axes_of(axis)) for n, axis in zip(shape, found)]
    for axis in {"a", "b", "c"} - set(used):
        assert mesh.axis_size(axis) == 1 or all(n % mesh.axis_size(axis) for n in held)
