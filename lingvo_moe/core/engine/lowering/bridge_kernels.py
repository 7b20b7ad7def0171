"""The HLO of a TensorFlow function, by TensorFlow's bridge to XLA with cheaper operations that give the same HLO.

The bridge has two kinds of kernels. Most write HLO directly, in some 0.05 ms. The others set up a pipeline of MLIR
passes for each operation, which takes 4 to 6 ms; a training step has hundreds of them. Those that are frequent are
replaced by operations of the first kind:

* Reciprocal by a quotient;
* matrix products (Einsum) and roots by custom calls, as stand-ins. In the HLO the operations that are meant take
  their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.private.tensorflow import called_functions, definition, hlo_pb2, xla_data_pb2

_LARGEST_CONSTANT = 4096  # elements: a literal of the program
_STAND_IN = "lingvo_moe."  # before the name of a TensorFlow operation
_PRODUCT = "/product"  # after the name of an Einsum: its product, before the transposition
_ROOTS = {"Sqrt": "sqrt", "Rsqrt": "rsqrt"}  # by operation, the HLO opcode
# The types whose products the bridge writes as one operation.
_EINSUM_TYPES = (tf.float32, tf.bfloat16, tf.complex64)


def bridge_hlo(concrete: Any, specs: Sequence[tf.TensorSpec]) -> bytes:
    """Returns the serialised HloModuleProto of a ConcreteFunction.

    The function and those that it calls are defined a second time, in a TensorFlow runtime that exists for this call
    only. So the definitions in the process's runtime stay as they are: TensorFlow's executor lacks the stand-ins. And
    nothing is kept (`core/private/tensorflow.py`).

    Args:
        concrete: traced with `jit_compile=True`.
        specs: of its arguments, without those that it captures.
    """
    definitions = []
    for function in called_functions(concrete):
        definitions.append(definition(function.name))
        _replace_all(definitions[-1], function)
    return _without_stand_ins(private.bridge_hlo(concrete, definitions, specs))


def _without_stand_ins(hlo: bytes) -> bytes:
    """A serialised HloModuleProto of cheaper kernels, with the operations that its stand-ins stand for."""
    module = hlo_pb2.HloModuleProto.FromString(hlo)
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.custom_call_target.startswith(_STAND_IN):
                _put_in_place(instruction)
    return module.SerializeToString()


def _replace_all(definition: Any, function: Any) -> None:
    """Replaces what can be replaced in the FunctionDef of an AtomicFunction."""
    results: dict[str, str] = {}  # names of results, old -> new
    for node in list(definition.node_def):
        if node.op not in ("Einsum", "Reciprocal", *_ROOTS):
            continue
        op = function.graph.get_operation_by_name(node.name)
        shapes = [t.shape for t in (*op.inputs, *op.outputs)]
        if not all(shape.is_fully_defined() for shape in shapes):
            continue
        if node.op in _ROOTS:
            results.update(_replace_root(node, op))
        elif node.op == "Reciprocal" and shapes[0].num_elements() <= _LARGEST_CONSTANT:
            results.update(_replace_reciprocal(definition, node, shapes[0].as_list()))
        elif node.op == "Einsum" and _dtype(node) in _EINSUM_TYPES:
            product = _product(node.attr["equation"].s.decode(), shapes)
            if product is not None:
                results.update(_replace_einsum(definition, node, product))
    if not results:
        return
    for node in definition.node_def:
        for i, name in enumerate(node.input):
            if name in results:
                node.input[i] = results[name]
    for key, name in list(definition.ret.items()):  # A map that is changed loses its place.
        definition.ret[key] = results.get(name, name)


def _dtype(node: Any) -> tf.DType:
    return tf.as_dtype(node.attr["T"].type)


def _replace_reciprocal(definition: Any, node: Any, shape: list[int]) -> dict[str, str]:
    """1 / x, with a constant of x's shape, as the other kernel writes it."""
    dtype = _dtype(node)
    _add_constant(definition, f"{node.name}/one", np.ones(shape, dtype.as_numpy_dtype), dtype)
    node.op = "RealDiv"
    node.input.insert(0, f"{node.name}/one:output:0")
    return {f"{node.name}:y:0": f"{node.name}:z:0"}


def _replace_root(node: Any, op: Any) -> dict[str, str]:
    _stand_in(node, [_dtype(node)], op.outputs[0].shape)
    return {f"{node.name}:y:0": f"{node.name}:results:0"}


@dataclass(frozen=True)
class _Product:
    """An Einsum of two tensors as one product and a transposition."""

    # Of both operands and of the product: what both have and the result keeps, then what only the first has, then what
    # only the second has.
    letters: tuple[str, str, str]
    shape: list[int]  # the shape of the product
    permutation: list[int] | None  # from the product to the result; None where they are the same


def _product(equation: str, shapes: list[tf.TensorShape]) -> _Product | None:
    """Returns the Einsum of these shapes, of operands and of the result, as one product; None if it is none."""
    operands, _, result = equation.partition("->")
    first, _, second = operands.partition(",")
    letters_in = set(first) | set(second)
    both = set(first) & set(second)
    once = all(len(set(letters)) == len(letters) for letters in (first, second, result))
    summed = letters_in - set(result)
    if not (
        once
        and second
        and "->" in equation
        and equation.replace("->", "").replace(",", "").isalpha()
    ):
        return None
    if not (summed <= both and set(result) <= letters_in):
        return None
    out = [c for c in first if c in both - summed]
    out += [c for c in first + second if c not in both]
    sizes = dict(zip(first, shapes[0].as_list())) | dict(zip(second, shapes[1].as_list()))
    if [sizes[c] for c in first] != shapes[0].as_list():  # a dimension of 1 that is repeated
        return None
    permutation = [out.index(c) for c in result]
    identity = permutation == list(range(len(out)))
    letters = (first, second, "".join(out))
    return _Product(letters, [sizes[c] for c in out], None if identity else permutation)


def _replace_einsum(definition: Any, node: Any, product: _Product) -> dict[str, str]:
    name, dtype = node.name, _dtype(node)
    _stand_in(node, [dtype, dtype], tf.TensorShape(product.shape), ",".join(product.letters))
    if product.permutation is None:
        return {f"{name}:output:0": f"{name}:results:0"}
    node.name = f"{name}{_PRODUCT}"
    permutation = np.array(product.permutation, np.int32)
    _add_constant(definition, f"{name}/permutation", permutation, tf.int32)
    inputs = [f"{node.name}:results:0", f"{name}/permutation:output:0"]
    transposed = definition.node_def.add(name=name, op="Transpose", input=inputs)
    transposed.attr["T"].type = dtype.as_datatype_enum
    transposed.attr["Tperm"].type = tf.int32.as_datatype_enum
    return {f"{name}:output:0": f"{name}:y:0"}


def _add_constant(definition: Any, name: str, value: np.ndarray, dtype: tf.DType) -> None:
    node = definition.node_def.add(name=name, op="Const")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))


def _stand_in(node: Any, operands: list[tf.DType], shape: tf.TensorShape, config: str = "") -> None:
    """Makes a node a custom call that stands for its operation; `config` says which."""
    node.attr.clear()
    node.attr["call_target_name"].s = f"{_STAND_IN}{node.op}".encode()
    node.attr["backend_config"].s = config.encode()
    node.attr["has_side_effect"].b = False
    node.attr["operand_dtypes"].list.type.extend(d.as_datatype_enum for d in operands)
    node.attr["result_dtypes"].list.type.append(operands[0].as_datatype_enum)
    node.attr["result_shapes"].list.shape.append(shape.as_proto())
    node.op = "XlaCustomCallV2"


def _put_in_place(instruction: Any) -> None:
    """Makes a stand-in the HLO operation that it stands for."""
    op, config = instruction.custom_call_target.removeprefix(_STAND_IN), instruction.backend_config
    for field in (
        "custom_call_target",
        "backend_config",
        "constrain_layout",
        "operand_shapes_with_layout",
        "custom_call_api_version",
        "feature_group_count",
        "batch_group_count",
        "precision_config",
    ):
        instruction.ClearField(field)
    instruction.metadata.op_type = op
    if op in _ROOTS:
        instruction.opcode = _ROOTS[op]
        return
    instruction.opcode = "dot"
    instruction.metadata.op_name = instruction.metadata.op_name.removesuffix(_PRODUCT)
    first, second, out = config.decode().split(",")
    numbers = instruction.dot_dimension_numbers
    numbers.SetInParent()  # also where there are none
    for letter in first:
        if letter in second:
            batch = letter in out
            left = numbers.lhs_batch_dimensions if batch else numbers.lhs_contracting_dimensions
            right = numbers.rhs_batch_dimensions if batch else numbers.rhs_contracting_dimensions
            left.append(first.index(letter))
            right.append(second.index(letter))
    default = xla_data_pb2.PrecisionConfig.DEFAULT
    instruction.precision_config.operand_precision.extend([default, default])
    for name in ("grad_x", "grad_y"):  # as the bridge writes them
        instruction.frontend_attributes.map[name] = "false"
