"""Cheaper operations for TensorFlow's bridge to XLA, which give the same HLO.

The bridge has two kinds of kernels. Most write HLO directly, in some 0.05 ms. The others set up a pipeline of MLIR
passes for each operation, which takes 5 ms; a training step has hundreds of them. `cheaper_kernels` replaces Einsum
and Reciprocal of a traced function by operations of the first kind while the function is lowered.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

# Private: TensorFlow has no public way to change a function's definition.
from tensorflow.python.eager import context

_LARGEST_CONSTANT = 4096  # elements: a literal of the program
# The types that the definition of XlaEinsum allows.
_EINSUM_TYPES = (tf.float32, tf.bfloat16, tf.complex64)
# The definitions are those of the process, and two functions that are lowered may call a third.
_lock = threading.RLock()


@contextmanager
def cheaper_kernels(concrete: Any) -> Iterator[None]:
    """Inside, the runtime's definition of a ConcreteFunction, and of the functions that it calls, has the cheaper
    operations. Its Python graph stays as it is. Afterwards the definitions are the original ones, since functions
    that the user decorated with `tf.function` may be among them, and TensorFlow's executor lacks XlaEinsum.

    Other threads that lower a function wait."""
    runtime = context.context()
    with _lock, ExitStack() as stack:
        for function in _functions(concrete):
            name = function.name
            original = runtime.get_function_def(name)
            cheaper = type(original).FromString(original.SerializeToString())
            if _replace_all(cheaper, function):
                runtime.remove_function(name)
                stack.callback(runtime.add_function_def, original)
                runtime.add_function_def(cheaper)
                stack.callback(runtime.remove_function, name)
        yield


def _functions(concrete: Any) -> list[Any]:
    """The AtomicFunctions of a function and of all that it calls."""
    found: dict[bytes, Any] = {}
    waiting = [concrete._inference_function]
    while waiting:
        function = waiting.pop()
        if function.name not in found:
            found[function.name] = function
            waiting.extend(function.children)
    return list(found.values())


def _replace_all(definition: Any, function: Any) -> bool:
    """Replaces what can be replaced in the FunctionDef of an AtomicFunction; whether there was any."""
    results: dict[str, str] = {}  # names of results, old -> new
    for node in list(definition.node_def):
        if node.op == "Einsum" and node.attr["N"].i == 2 and _dtype(node) in _EINSUM_TYPES:
            results.update(_replace_einsum(node))
        elif node.op == "Reciprocal":
            shape = function.graph.get_operation_by_name(node.name).outputs[0].shape
            if shape.is_fully_defined() and shape.num_elements() <= _LARGEST_CONSTANT:
                results.update(_replace_reciprocal(definition, node, shape.as_list()))
    if not results:
        return False
    for node in definition.node_def:
        for i, name in enumerate(node.input):
            if name in results:
                node.input[i] = results[name]
    for key, name in list(definition.ret.items()):  # A map that is changed loses its place.
        definition.ret[key] = results.get(name, name)
    return True


def _dtype(node: Any) -> tf.DType:
    return tf.as_dtype(node.attr["T"].type)


def _replace_einsum(node: Any) -> dict[str, str]:
    node.op = "XlaEinsum"
    del node.attr["N"]
    return {f"{node.name}:output:0": f"{node.name}:product:0"}


def _replace_reciprocal(definition: Any, node: Any, shape: list[int]) -> dict[str, str]:
    """1 / x, with a constant of x's shape, as the other kernel writes it."""
    dtype = _dtype(node)
    one = definition.node_def.add(name=f"{node.name}/one", op="Const")
    one.attr["dtype"].type = dtype.as_datatype_enum
    ones = np.ones(shape, dtype.as_numpy_dtype)
    one.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(ones))
    node.op = "RealDiv"
    node.input.insert(0, f"{one.name}:output:0")
    return {f"{node.name}:y:0": f"{node.name}:z:0"}
