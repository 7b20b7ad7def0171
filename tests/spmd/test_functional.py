"""The functional form: a function in eager code that runs as one SPMD program."""

import collections
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from refusals import refuses
from spmd_case import floats, ints

from lingvo_moe import xla_sharding as xs
from lingvo_moe.core import sharding
from lingvo_moe.core.engine.eager.functional import ShardedFunction, shard_function
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.engine.lowering.tracing import LoweringError
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh, ShardingError, use_mesh

MESH = Mesh.parse("data:2,model:4")


def _ffn(x, wi, wo):
    """[B, M] -> [B, M]."""
    return tf.nn.tanh(x @ wi) @ wo


SHARDINGS = [("data", None), (None, "model"), ("model", None)]


def _ffn_args():
    return tuple(tf.constant(floats(*s) / 4) for s in ((4, 8), (8, 16), (16, 8)))


def _close(got, want, tolerance=1e-5):
    got, want = tf.nest.flatten(got), tf.nest.flatten(want)
    assert len(got) == len(want)
    for g, w in zip(got, want):
        if w is None:
            assert g is None
            continue
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g, w = (np.asarray(t, np.float32) for t in (g, w))
        assert np.max(np.abs(g - w), initial=0) <= tolerance * max(np.max(np.abs(w), initial=0), 1)


def _kinds(compiled):
    return dict(collections.Counter(c.kind for c in compiled.Collectives()))


def test_a_function_from_eager_code_with_its_gradients_of_two_orders():
    sharded = shard_function(_ffn, SHARDINGS, ("data", None), MESH)
    args = _ffn_args()

    def everything(fn):
        with tf.GradientTape() as outer:
            outer.watch(args)
            with tf.GradientTape() as inner:
                inner.watch(args)
                y = fn(*args)
                loss = tf.reduce_sum(y**3)  # plain eager code around the function
            first = inner.gradient(loss, args)
            norm = tf.add_n([tf.reduce_sum(g**2) for g in first])
        return [y, *first, *outer.gradient(norm, args)]

    want = everything(_ffn)
    _close(everything(sharded), want, 2e-4)
    _close(everything(sharded), want, 2e-4)  # the programs are there by now
    assert sharded.NumPrograms() == 1
    # The tensor-parallel half: one all-reduce of partial sums; a result annotated as sharded is not gathered.
    assert _kinds(sharded.Compiled(*args)) == {"all-reduce": 1}
    # Backward: of x over `model`, of both weights over `data`.
    assert _kinds(sharded.CompiledGradient(*args))["all-reduce"] >= 2
    assert sharded.Program(*args).mesh == MESH


def test_gradients_are_computed_for_what_is_watched():
    sharded = shard_function(_ffn, SHARDINGS, ("data", None), MESH)
    x, wi, wo = _ffn_args()
    with tf.GradientTape() as tape:
        tape.watch(wo)
        loss = tf.reduce_sum(sharded(x, wi, wo) ** 2)
    with tf.GradientTape() as plain:
        plain.watch(wo)
        want = tf.reduce_sum(_ffn(x, wi, wo) ** 2)
    got = tape.gradient(loss, [x, wi, wo])
    assert got[:2] == [None, None]
    _close(got[2], plain.gradient(want, wo), 1e-4)
    # By wo alone there is one sum, over `data`; by all there are those of wi and x, too.
    (bound,) = sharded._programs.values()
    few, many = (bound.operation.Gradient(by).compiled for by in ([2], None))
    assert len(few.Collectives()) < len(many.Collectives())


def _steps(fn, steps=4):
    """A small network in eager code: an embedding and a normalization around `fn`, by gradient descent."""
    table = tf.Variable(floats(12, 8, seed=1))
    wi, wo = tf.Variable(floats(8, 16, seed=2) / 4), tf.Variable(floats(16, 8, seed=3) / 4)
    scale = tf.Variable(tf.ones([8]))
    variables = [table, wi, wo, scale]
    losses = []
    for step in range(steps):
        ids, target = ints(8, below=12, seed=step), floats(8, 8, seed=100 + step)
        with tf.GradientTape() as tape:
            x = tf.gather(table, ids)
            y = x + fn(x, wi, wo)
            y = scale * (y - tf.reduce_mean(y, -1, keepdims=True))
            loss = tf.reduce_mean((y - target) ** 2)
        for v, g in zip(variables, tape.gradient(loss, variables)):
            v.assign_sub(0.1 * tf.convert_to_tensor(g))
        losses.append(loss)
    return losses + variables


def test_training_in_eager_code_with_a_tensor_parallel_part():
    sharded = shard_function(_ffn, SHARDINGS, ("data", None), MESH)
    got, want = _steps(sharded), _steps(_ffn)
    _close(got, want, 1e-4)
    assert sharded.NumPrograms() == 1


Pair = collections.namedtuple("Pair", "first second")


def test_trees_constants_integers_and_what_is_not_used():
    def fn(batch, theta, power=2, *, negate=False):
        rows = tf.gather(theta.table, batch["ids"])
        y = rows * tf.cast(batch["mask"], rows.dtype)[:, None]
        y = (-y if negate else y) ** power
        return Pair(
            NestedMap(y=y, ids=batch["ids"]), [theta.pair[0] * 2.0, {"flag": batch["mask"]}]
        )

    sharded = shard_function(
        fn, {"batch": {"ids": ("data",)}, "theta": NestedMap(table=(None, "model"))}, mesh=MESH
    )
    batch = {"ids": tf.constant(ints(6, below=5)), "mask": tf.constant(ints(6, below=2) > 0)}
    theta = NestedMap(
        table=tf.constant(floats(5, 8)), pair=(tf.constant(1.5), tf.constant(floats(3)))
    )

    def outcome(f, **kwargs):
        with tf.GradientTape() as tape:
            tape.watch(theta)
            out = f(batch, theta, **kwargs)
            loss = tf.reduce_sum(out.first.y) + out.second[0]
        gradient = tape.gradient(loss, [theta.table, *theta.pair])
        return out, [None if g is None else tf.convert_to_tensor(g) for g in gradient]

    for kwargs in ({}, {"power": 3, "negate": True}):
        got, want = outcome(sharded, **kwargs), outcome(fn, **kwargs)
        tf.nest.assert_same_structure(got[0], want[0])
        assert type(got[0]) is Pair and type(got[0].first) is NestedMap
        _close(got, want)
        assert got[1][2] is None  # not used
    assert sharded.NumPrograms() == 2


def test_annotations_inside_take_effect_and_results_stay_where_they_are():
    @shard_function(mesh=MESH, out_shardings=AUTO)
    def contracted(a, b):
        a = sharding.mesh_split(a, MESH, (None, "model"))
        b = sharding.mesh_split(b, MESH, ("model", None))
        return a @ b

    a, b = tf.constant(floats(8, 8)), tf.constant(floats(8, 4))
    _close(contracted(a, b), a @ b)
    assert isinstance(contracted, ShardedFunction) and contracted.__name__ == "contracted"
    assert _kinds(contracted.Compiled(a, b)) == {"all-reduce": 1}


def test_inside_a_program_it_is_a_part_of_that_program():
    sharded = shard_function(_ffn, SHARDINGS, ("data", None), MESH)
    args = _ffn_args()
    specs = [TensorSpec(tuple(a.shape), "float32") for a in args]
    compiled = PjrtEngine(MESH).Build(lambda *a: 2.0 * sharded(*a), specs, results=AUTO)
    _close(tf.constant(np.asarray(compiled(*[a.numpy() for a in args]))), 2.0 * _ffn(*args))
    assert _kinds(compiled) == {"all-reduce": 1}
    twice = shard_function(lambda x, wi, wo: sharded(sharded(x, wi, wo), wi, wo), mesh=MESH)
    _close(twice(*args), _ffn(_ffn(*args), *args[1:]), 1e-4)
    assert sharded.NumPrograms() == 0
    message = r"_ffn: a sharded function was called inside a tf\.function"
    with pytest.raises(ShardingError, match=message):
        tf.function(sharded, autograph=False)(*args)


def test_programs_are_kept_by_signature_and_forgotten_in_turn():
    traced = []

    @shard_function(mesh=MESH, max_programs=2)
    def double(x):
        traced.append(x.shape)
        return x * 2.0

    for size in (8, 16, 8, 24, 8, 16):
        np.testing.assert_array_equal(double(tf.ones([size])), np.full(size, 2.0, np.float32))
    # 24 evicted 16, which is traced again; each trace is once for the graph and once for lowering.
    assert [s[0] for s in traced] == [8, 8, 16, 16, 24, 24, 16, 16]
    assert double.NumPrograms() == 2


def test_a_number_that_is_equal_to_another_but_not_the_same():
    scaled = shard_function(lambda x, n: x * n, mesh=MESH)
    x = tf.ones([2])
    assert not np.signbit(scaled(x, 0.0)).any() and np.signbit(scaled(x, -0.0)).all()
    assert np.isnan(scaled(x, float("nan"))).all() and np.isnan(scaled(x, float("nan"))).all()
    assert scaled.NumPrograms() == 3


def test_what_a_program_keeps_is_no_tensor_of_a_call():
    double = shard_function(lambda x: x * 2.0, mesh=MESH)
    x = tf.constant(floats(64, 64))
    held = weakref.ref(x)
    double(x)
    del x
    gc.collect()
    assert held() is None


def test_the_mesh_in_force_when_called():
    triple = shard_function(lambda x: x * 3.0, [("d",)])
    with use_mesh(Mesh.parse("d:8")):
        np.testing.assert_array_equal(triple(tf.ones([8])), np.full(8, 3.0, np.float32))
    with pytest.raises(ShardingError, match="no mesh; give shard_function one"):
        triple(tf.ones([8]))


VARIABLE = tf.Variable(tf.ones([8, 16]), name="table")
WATCHED = tf.constant(floats(8, 16))


@refuses(
    ShardingError,
    ({"in_shardings": ("data", None)}, r"_ffn: in_shardings=.* a list with an entry for each arg"),
    ({"in_shardings": SHARDINGS[:2]}, r"in_shardings: 2 entries for 3 argument\(s\) \(x, wi, wo\)"),
    ({"in_shardings": {"w": ("data", None)}}, r"no argument 'w' \(did you mean 'wo' or 'wi'\?\)"),
    ({"in_shardings": {"x": ("date", None)}}, r"mesh .* has no axis 'date' \(did you mean 'data'"),
    ({"in_shardings": {"wi": ("data",)}}, r"in_shardings: wi: a mapping of 1 dimensions"),
    ({"in_shardings": {"x": {"a": None}}}, r"x is a tensor of shape \[4, 8\], so its entry has"),
    ({"out_shardings": ("data",)}, r"out_shardings: result: a mapping of 1 dimensions"),
    ({"out_shardings": [("data", None)]}, r"out_shardings: result is a tensor"),
)
def test_wrong_shardings_name_the_argument(kwargs):
    shard_function(_ffn, **kwargs, mesh=MESH)(*_ffn_args())


@refuses(ShardingError,
    (lambda t: t["a"] * 2.0, [{"b": ("data",)}], [{"a": tf.ones([4])}], r"in_shardings: t has no 'b' \(known: a\)"),
    (lambda x: x * 2.0, [("model",)], [tf.ones([6])], r"x: dimension 0 .* 6 elements, not a multiple of the 4"),
    (lambda x, n: x * n, [None, ("model",)], [tf.ones([6]), 3.0], r"n is 3.0, no tensor; its entry has to be None"),
)  # fmt: skip
def test_wrong_trees_and_uneven_parts(fn, shardings, args):
    shard_function(fn, shardings, mesh=MESH)(*args)


@refuses(
    LoweringError,
    (lambda x: x @ VARIABLE, (tf.ones([4, 8]),), ShardingError, "not among its arguments: 'table"),
    (lambda x: x * 2.0, (object(),), ShardingError, "argument x is a object; arguments are dense"),
    (lambda x: x, (tf.ones([2], tf.float64),), "x is float64.* cast it to float32"),
    (lambda x: (x, None), (tf.ones([2]),), r"result\[1\] is None"),
    (lambda x: [], (tf.ones([2]),), "returns no tensor"),
    (lambda x: x[x > 0.0], (tf.ones([2]),), r"result.* has shape \(None,\)"),
    (lambda x: "a", (tf.ones([2]),), "result is of dtype string"),
)
def test_what_cannot_be_a_program(fn, args):
    shard_function(fn, mesh=MESH)(*args)


def test_a_bound_method_is_sharded_and_a_method_of_a_class_refused():
    class Doubling:
        factor = 2.0

        def __init__(self):
            self.bound = shard_function(self.Plain, mesh=MESH)

        def Plain(self, x):
            return x * self.factor

        Decorated = shard_function(Plain, mesh=MESH)

    x = tf.ones([4, 8])
    _close(Doubling().bound(x), 2.0 * x)
    with pytest.raises(ShardingError, match="on a method of Doubling; shard the bound method"):
        Doubling().Decorated(x)


def test_a_watched_tensor_that_is_not_an_argument_would_get_no_gradient():
    sharded = shard_function(lambda x: x @ WATCHED, mesh=MESH)
    x = tf.constant(floats(4, 8))
    _close(sharded(x), x @ WATCHED)
    with tf.GradientTape() as tape:
        tape.watch(WATCHED)
        message = r"tensor of shape \(8, 16\) that a GradientTape watches"
        with pytest.raises(ShardingError, match=message):
            sharded(x)


def test_jacobians_from_eager_code_only_and_no_forward_mode():
    sharded, x = shard_function(tf.sin, mesh=MESH), tf.constant(floats(4))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = sharded(x)
    with pytest.raises(Exception, match=r"inside a tf.function.*experimental_use_pfor=False"):
        tape.jacobian(y, x)
    found = tape.jacobian(y, x, experimental_use_pfor=False)
    np.testing.assert_allclose(found, np.diag(np.cos(x)), rtol=1e-5)
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)):
        with pytest.raises(ShardingError, match="sin: a ForwardAccumulator watches"):
            sharded(x)


def test_a_tensor_is_not_a_function():
    with pytest.raises(ShardingError, match="is no function"):
        shard_function(tf.ones([2]))


@pytest.mark.parametrize("use", [
    lambda x: xs.mesh_split(x, "model:4,data:2", ("data", None)),
    lambda x: xs.redistribute(x, ("data", None), ("model:4,data:2", ("data", None)), "data:2,model:4"),
    lambda x: xs.manual_region(tf.nn.relu, [("data", None)], ("data", None), "model:4,data:2")(x),
    lambda x: xs.looped_einsum("ab,bc->ac", x, tf.ones([4, 4]), "data", mesh="data:2,model:4"),
])  # fmt: skip
def test_a_mesh_is_taken_as_text(use):
    x = tf.reshape(tf.range(32.0), [8, 4])
    want = tf.reduce_sum(x, 1)
    got = xs.shard_function(lambda x: tf.reduce_sum(use(x), 1), mesh="data:2,model:4")(x)
    assert np.all(np.isin(got, [want, 4 * want]))


def test_functions_of_the_annotation_api_take_a_mesh_as_text():
    def fn(x):
        return xs.mesh_split(x, "data:2", ("data", None))

    specs = [TensorSpec((8, 4), "float32")]
    assert str(xs.explain(fn, specs, "data:2").mesh) == "data:2"
    assert xs.verify(fn, "data:2", tf.ones([8, 4])) is None
    assert xs.auto_shard(fn, "data:2").MeshInForce() == Mesh.parse("data:2")
    with xs.use_mesh("data:2") as mesh:
        assert mesh == Mesh.parse("data:2")
    assert xs.plan_redistribution([8, 4], 4, ("d:2", ("d", None)), ("d:2", (None, None)))
    for wrong, message in (("data", "'data' is not of the form"), (8, "is a int; give a sharding")):
        with pytest.raises(ShardingError, match=message):
            xs.shard_function(fn, mesh=wrong)


def test_a_message_names_a_tensor_as_before_it_was_annotated():
    def fn(x):
        return xs.mesh_split(xs.mesh_split(x, "data:2", ("data", None)), "data:2", ("data",))

    with pytest.raises(ShardingError, match=r"^mesh_split\(x:0, data:2, \('data',\)\)"):
        xs.shard_function(fn, mesh="data:2")(tf.ones([8, 4]))
