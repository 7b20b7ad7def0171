"""Shardings as HLO prints them: parsed, printed, expressed by mesh axes, and applied to tensors."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refuses

from lingvo_moe.analysis.programs.hlo.instructions import HloError
from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding, parse_sharding
from lingvo_moe.core.sharding import Mesh


def parse(text: str, num_devices: int = 8) -> TensorSharding:
    (found,) = parse_sharding(text, num_devices)
    return found


# --- reading


@pytest.mark.parametrize("text, tiles, devices, copies", [
    ("{devices=[8,1]0,1,2,3,4,5,6,7}", (8, 1), range(8), 1),
    ("{devices=[8,1]<=[8]}", (8, 1), range(8), 1),
    ("{devices=[2,4]<=[4,2]T(1,0)}", (2, 4), (0, 2, 4, 6, 1, 3, 5, 7), 1),
    ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", (2, 1), range(8), 4),
    ("{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}", (1, 4), (0, 4, 1, 5, 2, 6, 3, 7), 2),
    ("{devices=[2,1,2,2]<=[8] last_tile_dims={manual, replicated}}", (2, 1), range(8), 2),
])  # fmt: skip
def test_tiles_devices_and_copies(text, tiles, devices, copies):
    found = parse(text)
    assert (found.tiles, found.devices, found.copies) == (tiles, tuple(devices), copies)


def test_what_is_not_cut():
    assert parse("{replicated}").copies == 8
    assert parse("{replicated}").DeviceOf(()) == tuple(range(8))
    assert parse("{maximal device=3}").DeviceOf(()) == (3,)
    assert parse("{manual}").kind == "manual"
    assert parse("{devices=[1,1,8]<=[8] last_tile_dim_replicate}").is_sharded is False
    assert parse("{devices=[2,2,2]<=[8] last_tile_dims={manual}}").manual == 2


def test_a_tuple_has_one_for_each_array():
    text = "{{replicated}, {devices=[8]<=[8]}, /*index=2*/{{maximal device=1}, {manual}}}"
    assert [s.kind for s in parse_sharding(text, 8)] == ["replicated", "tiled", "maximal", "manual"]
    notes = '{{replicated metadata={{op_name="a"}, {op_name="b"}}}, {manual}}'
    assert [s.kind for s in parse_sharding(notes, 8)] == ["replicated", "manual"]
    assert parse_sharding("{}", 8) == ()


@refuses(
    HloError,
    ("replicated", "not a sharding"),
    ("{devices=[2,2]<=[8]}", "4 parts and copies names 8 devices"),
    ("{devices=[2,2]0,1,2,2}", "3 of them different"),
    ("{mesh['x'=8] ['x', ?]}", "cannot read the sharding"),
)
def test_what_cannot_be_read_is_refused(text):
    parse(text)


@st.composite
def shardings(draw):
    tiles = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))
    kinds = draw(st.lists(st.sampled_from(["replicated", "manual"]), max_size=2, unique=True))
    subgroups = tuple((kind, draw(st.sampled_from([2, 3]))) for kind in kinds)
    count = math.prod(tiles) * math.prod(n for _, n in subgroups)
    devices = tuple(draw(st.permutations(range(count))))
    return TensorSharding("tiled", tiles, devices, subgroups)


@given(shardings())
def test_text_is_read_back_as_it_was(sharding):
    assert parse(sharding.Text()) == sharding


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3), st.data())
def test_the_short_notation_is_the_long_one(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    devices = np.arange(math.prod(shape)).reshape(shape).transpose(order)
    dims = ",".join(map(str, devices.shape))
    listed = ",".join(map(str, devices.flatten()))
    reshaped, transposed = (",".join(map(str, numbers)) for numbers in (shape, order))
    short = parse(f"{{devices=[{dims}]<=[{reshaped}]T({transposed})}}")
    assert short == parse(f"{{devices=[{dims}]{listed}}}")


# --- the axes of a mesh

MESH = Mesh.parse("x:2,y:2,z:2")


@pytest.mark.parametrize(
    "mapping",
    [
        mapping
        for mapping in itertools.product([None, "x", "y", "z", ("x", "y"), ("z", "x")], repeat=2)
        if len(set(itertools.chain(*[m or () for m in mapping])))
        == sum(len(m or ()) for m in mapping)
    ],
)
@pytest.mark.parametrize("device_ids", [(), (7, 2, 5, 0, 1, 6, 3, 4)])
def test_axes_are_named_as_they_were_given(mapping, device_ids):
    mesh = Mesh(MESH.axis_names, MESH.shape, device_ids)
    per_dim = [(m,) if isinstance(m, str) else tuple(m or ()) for m in mapping]
    order = [axis for axes in per_dim for axis in axes]
    order += [axis for axis in mesh.axis_names if axis not in order]
    devices = mesh.device_array().transpose([mesh.axis_names.index(axis) for axis in order])
    tiles = tuple(mesh.axis_size(axes) for axes in per_dim)
    copies = mesh.size // math.prod(tiles)
    sharding = TensorSharding(
        "tiled", tiles, tuple(devices.flatten().tolist()), (("replicated", copies),)
    )
    assert sharding.OnMesh(mesh) == (mapping if any(mapping) else ())


@pytest.mark.parametrize("text", [
    "{devices=[4,2]<=[8] last_tile_dim_replicate}",  # half of an axis
    "{devices=[8]7,6,5,4,3,2,1,0}",
    "{maximal device=0}",
    "{manual}",
    "{devices=[4]<=[4]}",  # not all devices
])  # fmt: skip
def test_what_no_axis_can_name_has_no_mapping(text):
    assert parse(text).OnMesh(Mesh.parse("d:8")) is None


# --- parts


@given(shardings(), st.data())
def test_parts_cover_a_tensor_once(sharding, data):
    shape = tuple(data.draw(st.integers(n, 3 * n)) for n in sharding.tiles)
    counted = np.zeros(shape, np.int64)
    holders = []
    for part in np.ndindex(*sharding.tiles):
        extent = sharding.Extent(shape, part)
        counted[tuple(slice(*e) for e in extent)] += 1
        holders += sharding.DeviceOf(part)
        assert all(e - b <= n for (b, e), n in zip(extent, sharding.PartShape(shape), strict=True))
    assert np.all(counted == 1)
    assert tuple(holders) == sharding.devices
    held = [n * p for n, p in zip(sharding.tiles, sharding.PartShape(shape), strict=True)]
    assert sharding.Padding(shape) == tuple(h - s for h, s in zip(held, shape, strict=True))
