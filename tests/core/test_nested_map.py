"""NestedMap: attribute access, paths, and agreement with tf.nest."""

import pytest
import tensorflow as tf
from hypothesis import given, strategies as st

from lingvo_moe.core.nested_map import NestedMap, map_structure

_keys = st.from_regex(r"k[a-z0-9_]{0,4}", fullmatch=True)
_trees = st.dictionaries(
    _keys,
    st.recursive(
        st.integers(),
        lambda inner: st.one_of(st.dictionaries(_keys, inner), st.lists(inner, max_size=3)),
        max_leaves=8,
    ),
    max_size=4,
)


@given(_trees)
def test_flatten_and_pack_agree_with_tf_nest(tree):
    m = NestedMap.FromNestedDict(tree)
    assert m.Flatten() == tf.nest.flatten(m)
    assert m.Pack(m.Flatten()) == m
    assert m == tree
    doubled = tf.nest.map_structure(lambda x: 2 * x, m)
    assert doubled == m.Transform(lambda x: 2 * x)
    assert type(doubled) is NestedMap


@given(_trees)
def test_paths_find_their_leaves(tree):
    m = NestedMap.FromNestedDict(tree)
    for path, value in m.FlattenItems():
        assert m.GetItem(path) == value


def test_attributes_and_errors():
    m = NestedMap(alpha=1)
    m.Set("b.c", 2)
    assert m.b.c == 2 and m.Get("b.x", 5) == 5
    del m.b
    assert "b" not in m
    with pytest.raises(AttributeError, match="did you mean 'alpha'"):
        _ = m.alhpa
    with pytest.raises(KeyError, match="alpha"):
        m.GetItem("alhpa")
    for bad in ("a.b", "Flatten", "1a", ""):
        with pytest.raises(KeyError):
            m[bad] = 1
    with pytest.raises(ValueError, match="2 values for a structure of 1"):
        m.Pack([1, 2])


def test_map_structure_names_the_first_difference():
    a, b = NestedMap(x=1, y=NestedMap(z=2)), NestedMap(x=10, y=NestedMap(z=20))
    assert map_structure(lambda p, q: p + q, a, b) == NestedMap(x=11, y=NestedMap(z=22))
    with pytest.raises(ValueError, match=r"y\.w"):
        map_structure(lambda p, q: p, a, NestedMap(x=1, y=NestedMap(w=2)))


def test_filter_drops_maps_left_empty():
    m = NestedMap(a=1, b=NestedMap(c=[2, 3]), d=NestedMap(e=-1))
    assert m.Filter(lambda v: v != -1) == NestedMap(a=1, b=NestedMap(c=[2, 3]))
