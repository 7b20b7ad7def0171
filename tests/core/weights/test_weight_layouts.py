"""Layouts and rules: parts of tensors are where other ways to find them say, and come back to the same tensors."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lingvo_moe.core.weights.layout import joined, parts_of, rearranged, shape_of, split
from lingvo_moe.core.weights.mapping import WeightMapping, WeightRule
from lingvo_moe.core.weights.source import WeightsError

SIZES = {"n": 3, "k": 4, "w": 2, "r": 5, "t": 3, "two": 2, "first": 1, "second": 1, "e": 2}
# A layout, that of a variable, and the variable's values by NumPy's own means.
CASES = [
    ("(n k) r", "r n k", lambda x: x.reshape(3, 4, 5).transpose(2, 0, 1)),
    ("(n (k + w)) r", "r n k", lambda x: x.reshape(3, 6, 5)[:, :4].transpose(2, 0, 1)),
    ("(n (k + w)) r", "r n w", lambda x: x.reshape(3, 6, 5)[:, 4:].transpose(2, 0, 1)),
    (
        "(r + t two) n",  # pairs side by side become halves
        "n (r + two t)",
        lambda x: np.concatenate([x[:5], x[5::2], x[6::2]]).T,
    ),
    (
        "(n (k + t two)) r",
        "r n (k + two t)",
        lambda x: np.stack([x.T[:, 10 * n + np.r_[:4, 4:10:2, 5:10:2]] for n in range(3)], 1),
    ),
    ("e n (k (first + second))", "e n (k first)", lambda x: x[..., ::2]),
    ("e n (k (first + second))", "e n (k second)", lambda x: x[..., 1::2]),
    ("e n (first k + second k)", "e n (second k)", lambda x: x[..., 4:]),
]


def _numbers(layout):
    shape = shape_of(layout, SIZES)
    return np.arange(np.prod(shape)).reshape(shape)


@pytest.mark.parametrize(("before", "after", "expected"), CASES)
def test_a_part_of_a_tensor_is_rearranged(before, after, expected):
    np.testing.assert_array_equal(
        rearranged(_numbers(before), before, after, SIZES), expected(_numbers(before))
    )


@st.composite
def _layouts(draw):
    """A layout, and those of its parts, dimensions and factors in any order."""
    sizes = {axis: draw(st.integers(1, 4)) for axis in "abcdef"}
    shared = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
    terms = draw(st.sampled_from([[], ["d"], ["d", "e"], ["d", "e f"], ["d", "e", "f"]]))

    def layout(axes):
        axes = draw(st.permutations(axes))
        cut = draw(st.integers(0, len(axes)))
        dims = [f"({' '.join(dim)})" for dim in (axes[:cut], axes[cut:]) if dim]
        return " ".join(dims)

    total = f"({' + '.join(terms)})" if len(terms) > 1 else " ".join(terms)
    return (
        sizes,
        layout([*shared, total] if total else shared),
        [layout([*shared, *term.split()]) for term in terms or [""]],
    )


@settings(max_examples=200, deadline=None)
@given(_layouts())
def test_parts_of_any_layout_make_the_tensor_again(case):
    sizes, layout, layouts = case
    shape = shape_of(layout, sizes)
    tensor = np.arange(np.prod(shape)).reshape(shape)
    parts = {}
    for other in layouts:
        values = rearranged(tensor, layout, other, sizes)
        assert values.shape == shape_of(other, sizes)
        parts |= split(values, other, sizes)
    assert set(parts) == parts_of(layout)
    np.testing.assert_array_equal(joined(parts, layout, sizes), tensor)


RULES = (
    WeightRule("l.{layer}.kv", "(n (k + w)) r", "atten.k", "r n k"),
    WeightRule("l.{layer}.kv", "(n (k + w)) r", "atten.v", "r n w"),
    WeightRule("l.{layer}.{expert}.up", "r k", "experts.wi", "k r"),
    WeightRule("l.{layer}.down", "e r k", "experts.wo", "e k r"),
    WeightRule("l.{layer}.none", "r k", "other", "k r"),
)
SHAPES = {
    "body.atten.k": (2, 5, 3, 4),
    "body.atten.v": (2, 5, 3, 2),
    "body.experts.wi": (2, 2, 4, 5),
    "body.experts.wo": (2, 2, 4, 5),
}
PLACES = {"layer": [("body", 0), ("body", 1)]}


def test_a_mapping_goes_both_ways():
    mapping = WeightMapping(RULES, SHAPES, PLACES, SIZES)
    assert list(mapping.tensors) == [
        *(f"l.{i}.kv" for i in range(2)),
        *(f"l.{i}.{e}.up" for i in range(2) for e in range(2)),
        *(f"l.{i}.down" for i in range(2)),
    ]
    rng = np.random.default_rng(0)
    variables = {path: rng.normal(size=shape) for path, shape in SHAPES.items()}
    filled = {path: np.zeros(shape) for path, shape in SHAPES.items()}
    for name, pairs in mapping.tensors.items():
        tensor = mapping.Tensor(name, lambda pair: variables[pair.path][pair.index])
        assert tensor.shape == shape_of(pairs[0].rule.layout, SIZES)
        for pair in pairs:
            filled[pair.path][pair.index] = mapping.Values(pair, tensor)
    for path, values in variables.items():
        np.testing.assert_array_equal(filled[path], values)


def test_a_variable_without_a_tensor_is_refused():
    with pytest.raises(WeightsError, match=r"body\.bias has 8 values, of which this family"):
        WeightMapping(RULES, {**SHAPES, "body.bias": (2, 4)}, PLACES, SIZES)
