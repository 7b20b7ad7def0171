"""Lowering: from a TensorFlow function of trees of tensors, annotated, to a platform-neutral Program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import tensorflow as tf
from jax import export

from lingvo_moe.core.console.collection import paused_collection
from lingvo_moe.core.engine import xla
from lingvo_moe.core.engine.lowering.embedding import embedded
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.regions import isolate_regions
from lingvo_moe.core.engine.lowering.signature import Signature
from lingvo_moe.core.engine.lowering.sources import record
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec, numpy_dtype
from lingvo_moe.core.engine.lowering.tracing import LoweringError, trace
from lingvo_moe.core.sharding import Mesh, ShardingError

__all__ = ["AUTO", "LoweringError", "lower"]


def lower(
    fn: Callable[..., Any],
    arg_specs: Sequence[Any],
    mesh: Mesh,
    *,
    results: Any = None,
    donate: Sequence[int] = (),
    name: str = "",
) -> Program:
    """Lowers `fn(*trees)` for a mesh.

    Args:
        fn: a TensorFlow function of trees of tensors (NestedMaps, lists) that returns such a tree
            or a tuple of them.
        arg_specs: for each argument a tree of TensorSpecs or VariableSpecs.
        mesh: is in force while `fn` is traced; its devices are numbered in order.
        results: the shardings of results. None: a result whose argument of the same number is donated is
            sharded like that argument, all others are replicated. AUTO: the partitioner chooses. Else
            a tree of specs in the structure of the results.
        donate: numbers of arguments, e.g. (0,) for the state, whose memory the results take over.
            Result i then has to have the structure, shapes and dtypes of argument i.
        name: of the program; by default the function's.

    Raises:
        LoweringError: 64-bit tensors; a result that is None or that does not fit a donated argument
            or `results`.
        ShardingError: a spec or an annotation that does not fit the mesh.
    """
    if mesh.device_ids and mesh.device_ids != tuple(range(mesh.size)):
        raise ShardingError(
            f"{name or fn}: a program numbers its devices in order, but mesh {mesh} has device_ids "
            f"{mesh.device_ids}; give the engine its devices in that order instead"
        )
    with paused_collection():
        return _lower(*trace(fn, arg_specs, mesh, results=results, donate=donate, name=name))


def _lower(tf_function: Any, signature: Signature) -> Program:
    """The program of a traced function, see `trace`."""
    mesh = signature.mesh
    abstract = jax.sharding.AbstractMesh(mesh.shape, mesh.axis_names)

    def sharding(spec: TensorSpec) -> Any:
        if spec.split is None:
            return None
        return jax.sharding.NamedSharding(
            abstract, jax.sharding.PartitionSpec(*spec.split), memory_kind=xla.memory_kind(spec)
        )

    specs = [tf.TensorSpec(a.shape, a.dtype) for a in signature.args]
    jitted = jax.jit(
        embedded(tf_function, specs),
        out_shardings=tuple(sharding(spec) for spec in signature.results),
    )
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
    exported = isolate_regions(exported)
    return Program(
        signature,
        bytes(exported.serialize()),
        record(tf_function.get_concrete_function(*specs).graph),
    )
