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
from lingvo_moe.core.engine.lowering.interior_padding import without_interior_padding
from lingvo_moe.core.engine.lowering.sources import failed_operation
from lingvo_moe.core.engine.lowering.tracing import LoweringError
from lingvo_moe.core.private.jax import func, hlo_to_stablehlo, ir
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
    try:
        hlo = bridge_hlo(concrete, specs)
    except ValueError as e:
        if why := failed_operation(str(e), concrete.graph):
            raise LoweringError(why) from e
        raise
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
