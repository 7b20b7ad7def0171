"""Lowering: from a TensorFlow function of trees of tensors, annotated, to a platform-neutral Program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import tensorflow as tf
from jax import export

from lingvo_moe.core.console.collection import paused_collection
from lingvo_moe.core.engine.lowering.embedding import embedded
from lingvo_moe.core.engine.lowering.jax_shardings import named_sharding
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.signature import Signature
from lingvo_moe.core.engine.lowering.sources import record
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec, numpy_dtype
from lingvo_moe.core.engine.lowering.tracing import LoweringError, trace
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.core.task.step import Step

__all__ = ["AUTO", "LoweringError", "lower", "lower_step"]


def lower(
    fn: Callable[..., Any],
    arg_specs: Sequence[Any],
    mesh: Mesh | str,
    *,
    results: Any = None,
    donate: Sequence[int] = (),
    name: str = "",
) -> Program:
    """Lowers a step with these fields, as lower_step does."""
    return lower_step(Step(name, fn, arg_specs, donate, results), Mesh.parse(mesh, "lower: mesh"))


def lower_step(step: Step, mesh: Mesh, fused: bool = False) -> Program:
    """Lowers a step for a mesh, which is in force while the step is traced; its devices are numbered in order.

    `fused`: the devices have fused kernels (`devices.has_fused_kernels`), which the program may contain. Without any it
    is for all devices.

    Raises:
        LoweringError: 64-bit tensors; a result that is None or that does not fit a donated argument
            or `results`.
        ShardingError: a spec or an annotation that does not fit the mesh.
    """
    if mesh.device_ids and mesh.device_ids != tuple(range(mesh.size)):
        raise ShardingError(
            f"{step.name or step.fn}: a program numbers its devices in order, but mesh {mesh} has device_ids "
            f"{mesh.device_ids}; give the engine its devices in that order instead"
        )
    with paused_collection():
        traced = trace(step, mesh, fused=fused)
        specs = [tf.TensorSpec(a.shape, a.dtype) for a in traced.signature.args]
        exported = exported_bytes(embedded(traced.function, specs), traced.signature)
        return Program(traced.signature, exported, record(traced.graph))


def exported_bytes(call: Callable[..., Sequence[jax.Array]], signature: Signature) -> bytes:
    """A function of JAX of the signature's flat tensors, as `jax.export` serialises it."""
    mesh = signature.mesh
    abstract = jax.sharding.AbstractMesh(mesh.shape, mesh.axis_names)

    def sharding(spec: TensorSpec) -> Any:
        return named_sharding(spec, mesh, abstract)

    jitted = jax.jit(call, out_shardings=tuple(sharding(spec) for spec in signature.results))
    # TensorFlow lowers for the platform that it has; what it emits is plain StableHLO for any.
    exporter = export.export(
        jitted, platforms=["cpu"], disabled_checks=[export.DisabledSafetyCheck.platform()]
    )
    exported = exporter(
        *[
            jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype), sharding=sharding(spec))
            for spec in signature.args
        ]
    )
    return bytes(exported.serialize())
