"""From a program to what `jax.jit` compiles, for devices that are there or only described."""

from typing import Any

import jax
from jax import export

from lingvo_moe.core.engine.program import Program
from lingvo_moe.core.engine.specs import TensorSpec, numpy_dtype
from lingvo_moe.core.sharding import Mesh

_MEMORY = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "aliased": "alias_size_in_bytes",
}


def named_sharding(spec: TensorSpec, mesh: Mesh, jax_mesh: Any) -> Any:
    """The `jax.sharding.NamedSharding` of a spec; None where its split is None.

    Args:
        spec: of one tensor.
        mesh: the logical mesh that the spec's split speaks of.
        jax_mesh: the devices in that mesh's shape.
    """
    split = spec.OnMesh(mesh).split
    if split is None:
        return None
    return jax.sharding.NamedSharding(jax_mesh, jax.sharding.PartitionSpec(*split))


def trace(program: Program, jax_mesh: Any) -> Any:
    """A `jax.stages.Traced` of a program over the devices of `jax_mesh`: lower and compile it.

    Arguments and results are cut as the program's signature says; donated arguments are donated.
    """
    signature = program.signature

    def shardings(specs: tuple[TensorSpec, ...]) -> tuple[Any, ...]:
        return tuple(named_sharding(spec, program.mesh, jax_mesh) for spec in specs)

    args = shardings(signature.args)
    jitted = jax.jit(
        export.deserialize(bytearray(program.exported)).call,
        donate_argnums=signature.donated,
        in_shardings=args,
        out_shardings=shardings(signature.results),
    )
    return jitted.trace(
        *(
            jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype), sharding=sharding)
            for spec, sharding in zip(signature.args, args)
        )
    )


def memory(compiled: Any) -> dict[str, int]:
    """XLA's count of bytes on one device: arguments, outputs, temporaries, and aliased (donated) ones."""
    stats = compiled.memory_analysis()
    return {kind: int(getattr(stats, attribute)) for kind, attribute in _MEMORY.items()}


def cost(compiled: Any) -> dict[str, float]:
    """XLA's cost analysis for one device ('flops', 'bytes accessed', ...); a loop's body is counted once."""
    return dict(compiled.cost_analysis())
