"""The private parts of TensorFlow that this package uses, and the replacements of its functions while they run.

TensorFlow may change any of them in a minor version; `tests/core/private/test_private_tensorflow.py` then fails. No
other file imports from `tensorflow.python` or `tensorflow.compiler`.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# XLA's operations: borders of manual regions, custom calls, slices of places known while running.
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

# The messages of shardings and of HLO.
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python import pywrap_tfe

# The paper's annotation.
from tensorflow.python.compiler.xla.experimental import xla_sharding

# Tapes: what watches a tensor, and gradients of operations that are made outside of their sight.
from tensorflow.python.eager import backprop, context, forwardprop_util, record
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

# How operations are vectorized.
from tensorflow.python.ops.parallel_for import pfor

__all__ = [
    "forwardprop_util",
    "gen_xla_ops",
    "hlo_pb2",
    "pfor",
    "record",
    "xla_data_pb2",
    "xla_sharding",
]

# (make, type, inputs, ...) -> the operation that make(type, inputs, ...) makes, or another one.
Create = Callable[..., Any]
# (type, attributes, number of inputs, inputs, outputs, ...) -> gradients of the inputs.
Gradient = Callable[..., Any]
Converter = Callable[[Any], Any]

# oneDNN's product of 8-bit integers, of builds for x86-64; in graphs only.
QUANTIZED_PRODUCT = "_QuantizedMatMul"


def in_xla(graph: tf.Graph) -> bool:
    """Whether a graph that is being traced goes to XLA."""
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def tapes(x: tf.Tensor) -> int:
    """Says whether 0, 1 or more tapes watch a tensor."""
    return pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes([x])


def custom_gradient(fn: Callable[..., tuple[Any, Callable]]) -> Callable[..., Any]:
    """`tf.custom_gradient` for functions of tensors, whose gradient lives as long as the graph that calls it.

    TensorFlow registers each call's gradient under a name of its own and keeps it until the process ends, and with it
    all that the gradient refers to: the tensors of its graph, so the graph.
    """
    usual = tf.custom_gradient(fn)

    @functools.wraps(fn)
    @tf.autograph.experimental.do_not_convert
    def call(*args: Any) -> Any:
        results = usual(*args)
        if not tf.executing_eagerly():
            _give_gradient_to_graph(tf.nest.flatten(results)[0].op)
        return results

    return call


def _give_gradient_to_graph(op: tf.Operation) -> None:
    """`op` made the results of a call of tf.custom_gradient. The registry then refers to its gradient weakly."""
    name, registry = op.get_attr("_gradient_op_type").decode(), ops.gradient_registry._registry
    gradient = registry[name]["type"]
    refer: Callable[[], Any] = weakref.ref(gradient)
    registry[name]["type"] = lambda *args: refer()(*args)
    op.custom_gradient = gradient
    weakref.finalize(op.graph, registry.pop, name).atexit = False


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Inside, functions that this thread calls run as they were traced; a call that is traced here says so where it is
    loaded, too. TensorFlow's optimizer (Grappler) takes longer than several searches."""
    current, config = context.context(), tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    before = current.function_call_options
    current.function_call_options = context.FunctionCallOptions(config_proto=config)
    try:
        yield
    finally:
        current.function_call_options = before


def called_functions(concrete: Any) -> list[Any]:
    """The AtomicFunctions of a ConcreteFunction and of all that it calls; each has a name and a graph."""
    functions: dict[bytes, Any] = {}
    waiting = [concrete._inference_function]
    while waiting:
        function = waiting.pop()
        if function.name not in functions:
            functions[function.name] = function
            waiting.extend(function.children)
    return list(functions.values())


def functions_of(op: tf.Operation, attribute: str) -> list[Any]:
    """The AtomicFunctions that an attribute of an operation names, e.g. the branches of a case."""
    value = op.get_attr(attribute)
    named = value if isinstance(value, list) else [value]
    return [op.graph._get_function(function.name.encode()) for function in named]


def function_of(op: tf.Operation, attribute: str) -> Any:
    """The AtomicFunction that an attribute of an operation names, e.g. the body of a loop."""
    return functions_of(op, attribute)[0]


def inner_graphs(graph: tf.Graph) -> dict[str, tf.Graph]:
    """The graphs of the functions that are defined in a graph, by the functions' names."""
    graphs = {name: getattr(function, "graph", None) for name, function in graph._functions.items()}
    return {name: inner for name, inner in graphs.items() if inner is not None}


def forward_operation(op: tf.Operation) -> tf.Operation | None:
    """The operation that a gradient's operation recorded as its own: see `differentiating`."""
    return op._original_op


def recording_forward(op: tf.Operation) -> contextlib.AbstractContextManager[None]:
    """Inside, operations of the default graph record `op` as their forward operation."""
    return tf.compat.v1.get_default_graph()._original_op(op)


def definition(name: bytes) -> Any:
    """A copy of the runtime's FunctionDef of that name."""
    original = context.context().get_function_def(name)
    return type(original).FromString(original.SerializeToString())


def bridge_hlo(concrete: Any, definitions: Sequence[Any], specs: Sequence[tf.TensorSpec]) -> bytes:
    """The serialised HloModuleProto of a ConcreteFunction, by TensorFlow's bridge, in a runtime of its own.

    A runtime holds the graph of each function that it has lowered, some 8 kB an operation, until it is deleted itself.

    Args:
        definitions: FunctionDefs of it and of all that it calls.
        specs: of its arguments, without those that it captures.
    """
    runtime = context.Context()
    runtime.set_visible_devices([], "GPU")
    for definition in definitions:
        runtime.add_function_def(definition)
    return runtime.get_compiler_ir(
        device_name="/job:localhost/replica:0/task:0/device:CPU:0",
        platform_name="CPU",
        function_name=concrete.name,
        flat_args=list(specs),
        captured_inputs=concrete.captured_inputs,
        stage="hlo_serialized",
    )


def vectorized_call(function: Any, converter: Any, args: Sequence[Any]) -> list[Any]:
    """Converts a call of a function; `args` are wrapped tensors."""
    return pfor._convert_function_call(function, converter, args)


# --- replacements


@contextlib.contextmanager
def creating(create: Create) -> Iterator[None]:
    """Inside, `create` makes the operations of the default graph, which has to be a function's.

    Operations in the bodies of loops and of called functions are not seen; the loop or the call is one operation.
    """
    graph = tf.compat.v1.get_default_graph()
    make = graph._create_op_internal

    def instead(op_type: str, inputs: Sequence[Any], *rest: Any, **named: Any) -> Any:
        return create(make, op_type, inputs, *rest, **named)

    graph._create_op_internal = instead
    try:
        yield
    finally:
        del graph._create_op_internal


@contextlib.contextmanager
def differentiating(around: Callable[[Gradient], Gradient]) -> Iterator[None]:
    """Inside, tapes call `around(usual)` for the gradient of an operation, where `usual` is TensorFlow's function."""
    usual, register = backprop._gradient_function, pywrap_tfe.TFE_Py_RegisterGradientFunction
    register(around(usual))
    try:
        yield
    finally:
        register(usual)


def converter(op_type: str) -> Converter:
    """The function that vectorizes operations of a type."""
    return pfor._pfor_converter_registry[op_type]


@contextlib.contextmanager
def converting(converters: Mapping[str, Converter]) -> Iterator[None]:
    """Inside, these functions vectorize the operations of these types."""
    table = pfor._pfor_converter_registry
    before = {name: table.get(name) for name in converters}
    table.update(converters)
    try:
        yield
    finally:
        for name, usual in before.items():
            if usual is None:
                del table[name]
            else:
                table[name] = usual


def integers_product(x_RM: tf.Tensor, w_MN: tf.Tensor, bias_N: tf.Tensor) -> tf.Tensor:
    """uint8 [R,M] by int8 [M,N] and a float32 bias: float32 [R,N]. The kernel may pack w_MN at the first call."""
    graph = tf.compat.v1.get_default_graph()
    # The ranges at which an integer stands for itself.
    ranges = 0.0, 255.0, -127.0, 127.0
    rest = map(tf.convert_to_tensor, (bias_N, *ranges))
    inputs = [tf.bitcast(x_RM, tf.quint8), tf.bitcast(w_MN, tf.qint8), *rest]
    attributes = {
        "Tdevice_inputs": _list_attribute(type=[x.dtype.as_datatype_enum for x in inputs]),
        "Thost_inputs": _list_attribute(type=[]),
        "Tdevice_outputs": _list_attribute(type=[tf.float32.as_datatype_enum]),
        "Thost_outputs": _list_attribute(type=[]),
        "T1": tf.compat.v1.AttrValue(type=tf.quint8.as_datatype_enum),
        "T2": tf.compat.v1.AttrValue(type=tf.qint8.as_datatype_enum),
        "fused_ops": _list_attribute(s=[b"BiasAdd", b"Dequantize"]),
        "is_weight_const": tf.compat.v1.AttrValue(b=True),
        "is_bias_const": tf.compat.v1.AttrValue(b=True),
    }
    product = graph.create_op(
        QUANTIZED_PRODUCT, inputs, [tf.float32], attrs=attributes, name="quantized_matmul"
    )
    y_RN = product.outputs[0]
    y_RN.set_shape([x_RM.shape[0], w_MN.shape[1]])
    return y_RN


def _list_attribute(**values: list) -> tf.compat.v1.AttrValue:
    return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(**values))
