"""A traced TensorFlow function as a function of JAX, in which it becomes StableHLO.

`jax2tf.call_tf` is like it, but asks TensorFlow itself for the HLO, so that its slow kernels could not be replaced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.extend.core import Primitive
from jax.interpreters import mlir

from lingvo_moe.core.engine.lowering import regions
from lingvo_moe.core.engine.lowering.bridge_kernels import bridge_hlo
from lingvo_moe.core.private.jax import func, hlo_to_stablehlo, ir, stablehlo
from lingvo_moe.core.state.host_memory import PLACEMENT

_embedded = Primitive("call_tensorflow")
_embedded.multiple_results = True


def embedded(tf_function: Any, specs: Sequence[tf.TensorSpec]) -> Callable[..., tuple[Any, ...]]:
    """Returns a function of JAX that lowers to a call of a `tf.function` of flat tensors.

    It can be lowered only, neither run nor differentiated. Eager tensors that the `tf.function` captures become
    constants.

    `tf_function` has `jit_compile=True` and returns a flat tuple of tensors of static shapes.
    """

    def call(*args: Any) -> tuple[Any, ...]:
        return tuple(_embedded.bind(*args, tf_function=tf_function, specs=tuple(specs)))

    return call


@_embedded.def_abstract_eval
def _results(*_: Any, tf_function: Any, specs: tuple[tf.TensorSpec, ...]) -> list[Any]:
    outputs = tf_function.get_concrete_function(*specs).outputs
    return [jax.core.ShapedArray(t.shape.as_list(), t.dtype.as_numpy_dtype) for t in outputs]


def _lower(
    ctx: mlir.LoweringRuleContext, *args: Any, tf_function: Any, specs: tuple[tf.TensorSpec, ...]
) -> Sequence[Any]:
    concrete = tf_function.get_concrete_function(*specs)
    captured = [mlir.ir_constant(np.asarray(x)) for x in concrete.captured_inputs]
    hlo = bridge_hlo(concrete, specs)
    module = ir.Module.parse(hlo_to_stablehlo(hlo))
    # Strings stand in `hlo` as they are, so that no operation need be visited where there is nothing to find.
    if PLACEMENT.encode() in hlo:
        module.operation.walk(_as_xla_reads_placements)
    without_interior_padding(module)
    if regions.OPEN.encode() in hlo:
        regions.isolate_regions(module, len(args))
    main = ir.SymbolTable(module.operation)["main"]
    results = main.type.results
    context = ctx.module_context
    name = mlir.merge_mlir_modules(
        context.module, "tensorflow_function", module, dst_symtab=context.symbol_table
    )
    return func.CallOp(results, ir.FlatSymbolRefAttr.get(name), [*args, *captured]).results


def without_interior_padding(module: Any) -> None:
    """Changes a StableHLO module so that no Pad in it has interior padding, but reshapes and padding at the edges.

    XLA's partitioner gets a Pad with interior padding wrong, or ends the process, if the result is sharded along the
    padded dimension and the operand is not. TensorFlow writes the gradient of a strided slice as such a Pad, and that
    of average pooling. The same tensor comes out of a reshape from [n] to [n, 1], padding to [n, stride], a reshape to
    [n * stride] and padding at the edges, and all of these are partitioned rightly.
    """
    pads: list[Any] = []

    def remember(op: Any) -> Any:
        if op.name == "stablehlo.pad" and any(op.attributes["interior_padding"]):
            pads.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(remember)
    for op in pads:
        with module.context, op.location, ir.InsertionPoint(op):
            op.results[0].replace_all_uses_with(_rewritten(op))
        op.erase()


def _rewritten(op: Any) -> Any:
    """The value of a Pad, by operations before it."""
    operand, value = op.operands
    sizes, kind = operand.type.shape, operand.type.element_type
    low, high, interior = (
        list(op.attributes[name])
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    strides = [1 + between if size > 1 else 1 for size, between in zip(sizes, interior)]
    # As much of the low padding comes before every element as lets parts of the operand become parts of the result.
    firsts = [edge % stride for edge, stride in zip(low, strides)]
    lasts = [stride - 1 - first for stride, first in zip(strides, firsts)]

    def reshape(x: Any, shape: list[int]) -> Any:
        return stablehlo.reshape(ir.RankedTensorType.get(shape, kind), x)

    def pad(x: Any, low: list[int], high: list[int]) -> Any:
        return stablehlo.pad(x, value, low, high, [0] * len(low))

    x = reshape(operand, [n for size in sizes for n in (size, 1)])
    x = pad(
        x, [n for first in firsts for n in (0, first)], [n for last in lasts for n in (0, last)]
    )
    x = reshape(x, [size * stride for size, stride in zip(sizes, strides)])
    return pad(
        x,
        [edge - first for edge, first in zip(low, firsts)],
        [edge - last for edge, last in zip(high, lasts)],
    )


def _as_xla_reads_placements(op: Any) -> Any:
    """Writes the moves of host_memory.py as XLA reads them: the memory is an attribute, layouts are free."""
    if op.name == "stablehlo.custom_call":
        target = ir.StringAttr(op.attributes["call_target_name"]).value
        if target == PLACEMENT:
            memory = op.attributes["backend_config"]
            for name in ("operand_layouts", "result_layouts", "api_version"):
                if name in op.attributes:
                    del op.attributes[name]
            op.attributes["backend_config"] = ir.StringAttr.get("")
            place = ir.DictAttr.get({"_xla_buffer_placement": memory})
            op.attributes["mhlo.frontend_attributes"] = place
    return ir.WalkResult.ADVANCE


mlir.register_lowering(_embedded, _lower)
