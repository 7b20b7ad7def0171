"""A function of one slice, mapped over a mesh axis, computes what it computes for each slice by itself."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.layers.repeat import Repeat
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh, ShardingError, current_mesh, use_mesh
from lingvo_moe.core.sharding.annotate import mesh_split
from lingvo_moe.core.sharding.manual import manual_region
from lingvo_moe.core.sharding.vectorized import vectorized
from tests.core.pipeline.toy_stacks import Block

MESH = Mesh.parse("stage:4,data:2")
RNG = np.random.RandomState(0)
X = RNG.randn(4, 4, 6).astype(np.float32)
IDS = RNG.randint(0, 5, (4, 4)).astype(np.int32)


def _gather_rows(x, ids):
    return tf.gather(x, ids % 4), tf.gather(x, [3, 0]), tf.gather(x, 2, axis=1)


def _pad(x, ids):
    return tf.pad(x, [[1, 0], [0, 2]], constant_values=-1.0), tf.pad(ids, [[0, 1]])


def _bits(x, ids):
    seed = tf.stack([ids[0], ids[1]])
    return tf.cast(tf.bitcast(randomness.bits(seed, [3, 2]), tf.int32), tf.float32) * 1e-9 + x[0, 0]


def _sums(x, ids):
    return tf.math.unsorted_segment_sum(x, ids, 5)


def _loop(x, ids):
    def step(i, y):
        return i + 1, y + tf.sin(y) * tf.cast(ids[i], tf.float32)[tf.newaxis]

    return tf.while_loop(lambda i, _: i < 3, step, (tf.constant(0), x))[1]


def _gradient_of_a_loop(x, ids):
    layer = Repeat.Params().Set(name="r", body=Block.Params(), num_repeats=3).Instantiate()
    theta = NestedMap(body=NestedMap(w=tf.stack([x[:1] * x[:1, :1] * tf.eye(6)] * 3)))
    shared = NestedMap(real=ids > 0, share=tf.constant(1.0))
    with tf.GradientTape() as tape:
        tape.watch(theta.body.w)
        y, extras = layer.FProp(theta, x[:, tf.newaxis], shared)
    return tape.gradient([y, extras.square], theta.body.w)


def _annotated(x, ids):
    return (
        mesh_split(tf.sin(x), current_mesh(), ("data", None))
        + tf.cast(ids, tf.float32)[:, tf.newaxis]
    )


def _region(x, ids):
    def rows(x, ids):
        return tf.gather(x, ids % x.shape[0]), tf.reduce_sum(x, 1)

    region = manual_region(rows, [("data", None), ("data",)], [("data", None), ("data",)])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, total = region(x, ids)
        loss = tf.reduce_sum(tf.square(y)) + tf.reduce_sum(total)
    return y, total, tape.gradient(loss, x)


FUNCTIONS = [_gather_rows, _pad, _bits, _sums, _loop, _gradient_of_a_loop, _annotated, _region]


def _flat(results):
    return tf.nest.flatten(results)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__[1:])
def test_each_slice_is_as_by_itself(fn):
    def mapped(x, ids):
        shards = [
            mesh_split(t, current_mesh(), ("stage", *[None] * (t.shape.rank - 1))) for t in (x, ids)
        ]
        return tuple(vectorized(lambda *one: _flat(fn(*one)), "stage", shards))

    specs = [TensorSpec(X.shape, "float32", ()), TensorSpec(IDS.shape, "int32", ())]
    found = PjrtEngine(MESH).Build(mapped, specs)(X, IDS)
    with use_mesh(Mesh(MESH.axis_names, (1, 1))):
        one = tf.function(lambda x, ids: _flat(fn(x, ids)), autograph=False, jit_compile=True)
        # Where a region is divided over `data`, rows are those of a device.
        wanted = (
            _of_halves(one) if fn is _region else [one(x, i) for x, i in zip(X, IDS, strict=True)]
        )
    for have, want in zip(found, zip(*wanted, strict=True), strict=True):
        np.testing.assert_allclose(have, np.stack(want), 2e-6, 2e-6)


def _of_halves(one):
    return [
        [np.concatenate(parts) for parts in zip(one(x[:2], i[:2]), one(x[2:], i[2:]), strict=True)]
        for x, i in zip(X, IDS, strict=True)
    ]


def test_a_region_lies_inside_two_mappings():
    """It names the axis of one of them, as the groups of experts do beside `data`."""

    def inner(x):
        axes = ("data", "expert")
        return [manual_region(lambda x: tf.cumsum(x, 0), [(axes, None)], (axes, None))(x)]

    def mapped(x):
        halves = tf.reshape(x, [2, 2, 4, 6])
        return vectorized(lambda x: vectorized(inner, "data", [x]), "stage", [halves])[0]

    x = RNG.randn(2, 8, 6).astype(np.float32)
    engine = PjrtEngine(Mesh.parse("stage:2,data:2,expert:2"))
    found = engine.Build(mapped, [TensorSpec(x.shape, "float32", ())])(x)
    want = x.reshape(2, 2, 2, 2, 6).cumsum(3).reshape(2, 2, 4, 6)  # over the rows of a device
    np.testing.assert_allclose(found, want, 2e-6, 2e-6)


def test_a_region_of_one_axis_is_refused():
    region = manual_region(lambda x: x, [("data", None)], ("data", None), axis="data")
    with use_mesh(MESH), pytest.raises(ShardingError, match="cannot have a region of axis 'data'"):
        tf.function(lambda x: vectorized(lambda x: [region(x)], "stage", [x]))(tf.constant(X))


def test_what_cannot_be_mapped_is_refused():
    x = tf.constant(X)
    with use_mesh(MESH), pytest.raises(ShardingError, match="3 slices are not a multiple"):
        vectorized(lambda x: [x], "stage", [x[:3]])
    with use_mesh(MESH), pytest.raises(ShardingError, match="has no axis 'stages'"):
        vectorized(lambda x: [x], "stages", [x])
    with pytest.raises(ShardingError, match="no mesh is in force"):
        vectorized(lambda x: [x], "stage", [x])

    def other_lengths(ids):
        return [tf.while_loop(lambda i: i < ids[0], lambda i: i + 1, [tf.constant(0)])[0]]

    @tf.function(autograph=False)
    def run():
        return vectorized(other_lengths, "stage", [tf.constant(IDS)])

    with (
        use_mesh(Mesh(MESH.axis_names, (1, 1))),
        pytest.raises(ValueError, match="loop's length differs"),
    ):
        run()
