"""Letters of tensors and axes of meshes; tests/spmd/ has the annotations."""

import pytest
import tensorflow as tf

from lingvo_moe.core import sharding
from lingvo_moe.core.sharding import Mesh, ShardingError, use_mesh


@pytest.mark.parametrize("letters, groups, expected", [
    ("GSEC", "expert", ("expert", None, None, None)),
    ("EGCM", "expert", ("expert", None, None, None)),
    ("SGEM", "expert", (None, "expert", None, None)),
    ("EGCM", ("data", "expert"), ("expert", "data", None, None)),
    ("GECM", ("data", "expert"), (("data", "expert"), None, None, None)),
])  # fmt: skip
def test_the_leftmost_letter_takes_the_axis_and_another_what_is_left(letters, groups, expected):
    assert sharding.dims_mapping(letters, {"G": groups, "E": "expert"}) == expected


def test_a_weights_own_key_wins_over_the_letter():
    split = {"H": None, "wi.H": "model", "E": ("x", "y")}
    assert sharding.dims_mapping("EMH", split, "wi") == (("x", "y"), None, "model")
    assert sharding.dims_mapping("EHM", split, "wo") == (("x", "y"), None, None)


def test_on_one_device_letters_have_nothing_to_cut():
    with use_mesh(sharding.single_device()):
        x = tf.ones([4, 4])
        assert sharding.shard_letters(x, "GM", {"G": "other"}) is x
        assert sharding.split(x, 0, 1) is x
        with pytest.raises(ShardingError, match="must divide the 1 devices"):
            sharding.split(x, 0, 2)


def test_a_mesh_over_another_number_of_devices():
    """The first axis changes, the others stay; on one device there is nothing to shard."""
    mesh = Mesh.parse("data:256,model:8")
    assert str(mesh.over_devices(16)) == "data:2,model:8"
    assert str(mesh.over_devices(2048)) == str(mesh)
    assert str(mesh.over_devices(1)) == "data:1,model:1"
    assert str(Mesh.parse("expert:2048").over_devices(3)) == "expert:3"
    with pytest.raises(ShardingError, match="data:256,model:8 cannot be laid over 12 devices"):
        mesh.over_devices(12)


def test_mesh_parse_and_its_errors():
    mesh = Mesh.parse("data:2,expert:4")
    assert (mesh.axis_names, mesh.shape, mesh.size) == (("data", "expert"), (2, 4), 8)
    assert str(mesh) == "data:2,expert:4" and mesh.axis_size(("data", "expert")) == 8
    for bad in ("expert", "expert:x", "a:2,a:4", "expert:0", "expert:²", ":8", ""):
        with pytest.raises(ShardingError):
            Mesh.parse(bad)
    with pytest.raises(ShardingError, match="did you mean 'expert'"):
        mesh.axis_size("experts")
    with pytest.raises(ShardingError, match="once"):
        Mesh(("x",), (2,), (0, 0))
