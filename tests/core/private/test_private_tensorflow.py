"""The private parts of TensorFlow do what core/private/tensorflow.py says, and are as before afterwards."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.config import flags

from lingvo_moe.core.private import tensorflow as private


@tf.function(autograph=False)
def _inner(x):
    return x + 1.0


@tf.function(autograph=False)
def _outer(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y * 2.0), (0, _inner(x)))[1]


def test_operations_of_graphs_are_prepared_in_c():
    """TensorFlow knows the variable that `import_tensorflow` sets."""
    assert flags.config().graph_building_optimization.value()


def test_a_function_is_lowered_by_another_definition():
    @tf.function(autograph=False, jit_compile=True)
    def f(x):
        return x + 1.0

    spec = tf.TensorSpec([], tf.float32)
    concrete = f.get_concrete_function(spec)
    (function,) = private.called_functions(concrete)
    new = private.definition(function.name)
    (added,) = (node for node in new.node_def if node.op == "AddV2")
    added.op = "Mul"
    hlo = private.hlo_pb2.HloModuleProto.FromString(private.bridge_hlo(concrete, [new], [spec]))
    opcodes = {i.opcode for computation in hlo.computations for i in computation.instructions}
    assert "multiply" in opcodes and "add" not in opcodes
    assert [n.op for n in private.definition(function.name).node_def].count("Mul") == 0
    assert f(tf.constant(3.0)) == 4.0


def test_functions_that_a_function_calls():
    concrete = _outer.get_concrete_function(tf.TensorSpec([], tf.float32))
    found = private.called_functions(concrete)
    types = {op.type for each in found for op in each.graph.get_operations()}
    assert {"AddV2", "Mul", "Less"} <= types
    (loop,) = (op for op in concrete.graph.get_operations() if op.type.endswith("While"))
    body = private.function_of(loop, "body")
    assert "Mul" in {op.type for op in body.graph.get_operations()}
    assert body.graph in private.inner_graphs(concrete.graph).values()


def test_operations_are_made_otherwise_for_a_while():
    made = []

    def create(make, op_type, inputs, *rest, **named):
        made.append(op_type)
        return make(op_type, inputs, *rest, **named)

    @tf.function(autograph=False)
    def f(x):
        with private.creating(create):
            y = tf.exp(x)
        return y * 2.0

    f.get_concrete_function(tf.TensorSpec([], tf.float32))
    assert made == ["Exp"]


def test_gradients_are_made_otherwise_for_a_while():
    found = []

    def around(usual):
        def gradient(op_name, *rest):
            found.append(op_name)
            return usual(op_name, *rest)

        return gradient

    def run():
        x = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        assert tape.gradient(y, x) == 4.0

    with private.differentiating(around):
        run()
    run()
    assert found == ["Mul"]


def test_a_custom_gradient_lives_as_long_as_its_graph():
    @private.custom_gradient
    def tripled(x):
        return tf.identity(x), lambda dx: 3.0 * dx

    @tf.function(autograph=False)
    def loop(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tripled(y)), (0, x))[1]

    x = tf.constant(1.0)
    for fn, want in ((tripled, 3.0), (tf.function(tripled), 3.0), (loop, 9.0)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        assert tape.gradient(y, x) == want
    spec = tf.TensorSpec([], tf.float32)
    graph = tf.function(tripled, autograph=False).get_concrete_function(spec).graph
    (op,) = (op for op in graph.get_operations() if op.type == "IdentityN")
    name, registry = op.get_attr("_gradient_op_type").decode(), private.ops.gradient_registry
    assert name in registry.list()
    graph, op = weakref.ref(graph), None
    gc.collect()
    assert graph() is None and name not in registry.list()


def test_an_operation_records_its_forward_operation():
    with tf.Graph().as_default():
        x = tf.constant(1.0)
        with private.recording_forward(x.op):
            y = tf.identity(x)
        assert private.forward_operation(y.op) is x.op
        assert private.forward_operation(x.op) is None


# TensorFlow has a converter for the first.
@pytest.mark.parametrize("op_type", ["Exp", "XlaSharding"])
def test_operations_are_vectorized_otherwise_for_a_while(op_type):
    def convert(given):
        return private.pfor.wrap(10.0 * given.stacked_input(0), True)

    x = tf.constant([[0.0], [1.0]])
    table = private.pfor._pfor_converter_registry
    before = table.get(op_type)
    with private.converting({op_type: convert}):
        if op_type == "Exp":
            np.testing.assert_array_equal(tf.vectorized_map(tf.exp, x), 10.0 * x)
        assert private.converter(op_type) is convert
    assert table.get(op_type) is before


def test_what_watches_a_tensor():
    x, y = tf.constant(1.0), tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert private.record.should_record_backprop([x])
        assert not private.record.should_record_backprop([y])
        assert (private.tapes(x), private.tapes(y)) == (1, 0)
        with private.record.stop_recording():
            z = x * 2.0
        private.record.record_operation("Mine", [z], [x], lambda dz: [3.0 * dz])
        assert not private.forwardprop_util.pack_tangents([x]).tangents
    assert tape.gradient(z, x) == 3.0
    with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)):
        assert len(private.forwardprop_util.pack_tangents([x]).tangents) == 1


def test_graphs_for_xla():
    found = {}

    def f(x):
        found[jit] = private.in_xla(tf.compat.v1.get_default_graph())
        return x

    for jit in (False, True):
        tf.function(f, jit_compile=jit, autograph=False).get_concrete_function(tf.constant(1.0))
    assert found == {False: False, True: True}


def test_messages_and_operations_of_xla():
    sharding = private.xla_data_pb2.OpSharding()
    sharding.ParseFromString(
        private.xla_sharding.Sharding.tile(np.arange(2)).proto.SerializeToString()
    )
    assert list(sharding.tile_assignment_devices) == [0, 1]
    assert private.hlo_pb2.HloModuleProto(name="m").name == "m"
    for name in (
        "xla_custom_call_v2",
        "xla_dynamic_update_slice",
        "xla_spmd_full_to_shard_shape",
        "xla_spmd_shard_to_full_shape",
    ):
        assert callable(getattr(private.gen_xla_ops, name))


def test_products_of_8_bit_integers():
    random = np.random.RandomState(0)
    x, w = random.randint(0, 256, [3, 16]), random.randint(-64, 65, [16, 4])
    got = tf.function(private.integers_product, autograph=False)(
        tf.constant(x, tf.uint8), tf.constant(w, tf.int8), tf.constant([1.0, 2.0, 3.0, 4.0])
    )
    np.testing.assert_array_equal(got, x @ w + [1, 2, 3, 4])


def test_calls_that_run_as_they_were_traced():
    inner = tf.function(lambda x: x + 1, experimental_attributes={"_noinline": True})

    def outer(x):
        with private.unoptimized():
            y = inner(x)
        return y + inner(x)

    graph = tf.function(outer).get_concrete_function(tf.TensorSpec([])).graph
    configs = [op.get_attr("config_proto") for op in graph.get_operations() if "Call" in op.type]
    options = [tf.compat.v1.ConfigProto.FromString(c).graph_options for c in configs]
    assert [o.rewrite_options.disable_meta_optimizer for o in options] == [True, False]
