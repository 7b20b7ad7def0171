"""Compiles a program with `jax.jit`, for real or described devices."""

from dataclasses import replace
from typing import Any

import jax
from jax import export

from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.lowering.jax_shardings import memory_kind, named_sharding
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.specs import TensorSpec, numpy_dtype
from lingvo_moe.core.engine.program_analysis import OFF, program_analysis
from lingvo_moe.core.private.jax import ir
from lingvo_moe.core.sharding import ShardingError
from lingvo_moe.core.sharding.letters import HOST

_MEMORY = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "aliased": "alias_size_in_bytes",
}


def trace(program: Program, jax_mesh: Any) -> Any:
    """A `jax.stages.Traced` of a program over the devices of `jax_mesh`: lower and compile it.

    Arguments and results have the shardings of the program's signature; donated arguments are donated.
    """
    signature = program.signature

    # If some tensor is on the host, JAX wants to know of each where it is.
    on_device = "device" if any(s.memory == HOST for s in signature.args) else None

    def sharding(spec: TensorSpec) -> Any:
        plain = named_sharding(spec, program.mesh, jax_mesh)
        if plain is None or on_device is None or spec.memory == HOST:
            return plain
        return plain.with_memory_kind(on_device)

    def shardings(specs: tuple[TensorSpec, ...]) -> tuple[Any, ...]:
        return tuple(map(sharding, specs))

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


def place_arguments(lowered: Any, program: Program) -> None:
    """Writes into a lowered program in which memory its arguments and results are.

    JAX does so itself where the devices can be asked for their memories, which described GPUs cannot.

    `lowered`, a `jax.stages.Lowered` of the program, is changed.
    """
    module, signature = lowered.compiler_ir(), program.signature
    with module.context:
        main = ir.SymbolTable(module.operation)["main"]
        for name, specs in (("arg_attrs", signature.args), ("res_attrs", signature.results)):
            placed = []
            for attributes, spec in zip(main.attributes[name], specs, strict=True):
                by_name = {attribute.name: attribute.attr for attribute in ir.DictAttr(attributes)}
                by_name["mhlo.memory_kind"] = ir.StringAttr.get(memory_kind(spec) or "device")
                placed.append(ir.DictAttr.get(by_name))
            main.attributes[name] = ir.ArrayAttr.get(placed)


def compile_for(program: Program, jax_mesh: Any, options: dict[str, Any], known_faults: str) -> Any:
    """A `jax.stages.Compiled` of a program over the devices of `jax_mesh`.

    The program was lowered for a mesh of that shape; `known_faults` is one of `program_analysis.ACTIONS`.

    Raises:
        ShardingError: XLA's partitioner is known to compute a part of it wrongly, and `known_faults`
            is 'error'.
        ShardingError: the partitioner chose a result's sharding (AUTO) that axes of the mesh cannot
            express.
    """
    try:
        lowered = trace(program, jax_mesh).lower()
        if known_faults == OFF or program.mesh.size == 1:
            return lowered.compile(compiler_options=options)
        return program_analysis().compile_checked(lowered, options, program, known_faults)
    except (ShardingError, EngineError):
        raise
    except ValueError as e:
        names = _unnameable(program, jax_mesh, options)
        if not names:
            raise
        raise ShardingError(
            f"program {program.name!r}: the partitioner shards {' or '.join(names)} in a way that the "
            f"axes of mesh {program.mesh} cannot name ({e}); request it replicated (results=None) or with "
            "a sharding, or annotate it with a mapping of the mesh (mesh_split) before it is "
            "returned"
        ) from e


def _unnameable(program: Program, jax_mesh: Any, options: dict[str, Any]) -> list[str]:
    """The result left to the partitioner that cannot be named (those, where it takes several); empty
    where the program does not compile even with whole results. JAX does not say which it is, so it
    is found by compiling with fewer and fewer of them left free."""
    signature = program.signature

    def fails(free: list[int]) -> bool:
        results = tuple(
            spec if i in free or spec.split is not None else replace(spec, split=())
            for i, spec in enumerate(signature.results)
        )
        variant = replace(program, signature=replace(signature, results=results))
        try:
            trace(variant, jax_mesh).lower().compile(compiler_options=options)
        except ValueError:
            return True
        return False

    free = [i for i, spec in enumerate(signature.results) if spec.split is None]
    if not free or fails([]):
        return []
    while len(free) > 1:
        half = len(free) // 2
        part = next((p for p in (free[:half], free[half:]) if fails(p)), None)
        if part is None:
            break
        free = part
    return [signature.results[i].name for i in free]


def memory(compiled: Any) -> dict[str, int]:
    """XLA's count of bytes on one device: arguments, outputs, temporaries, and aliased (donated) ones."""
    stats = compiled.memory_analysis()
    return {kind: int(getattr(stats, attribute)) for kind, attribute in _MEMORY.items()}


def cost(compiled: Any) -> dict[str, float]:
    """XLA's cost analysis for one device ('flops', 'bytes accessed', ...); a loop's body is counted once.

    Empty for a GPU program: its compiler keeps none.
    """
    return dict(compiled.cost_analysis() or {})
