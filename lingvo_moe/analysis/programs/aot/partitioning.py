"""Gets the HLO text of a program before and after XLA's SPMD partitioner.

XLA can dump its module between passes. Two dumps are used: after sharding propagation, where every
instruction has its global shape and a sharding; and after partitioning, where it has the shape of one
device's part, and the collectives are inserted.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from lingvo_moe.analysis.programs.aot.partition_dump import Partitioned, dump_options, read_dump
from lingvo_moe.core.engine import xla
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.pjrt import PjrtEngine

# Nothing is run: machine code need not be fast.
_CPU_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def partition(program: Program, topology: str = "") -> Partitioned:
    """Compiles a program for the devices of its mesh and returns its module before and after partitioning.

    It is compiled for the first devices of this process, or ahead of time for a topology, e.g. 'v3:2x2'.

    Raises:
        EngineError: too few devices; no such slice; the compiler refused the program before it was
            partitioned, or wrote nothing down.
    """
    lowered, options = _lowered(program, topology)
    error: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="lingvo_moe_") as directory:
        try:
            with _no_cache():
                lowered.compile(compiler_options=options | dump_options(directory))
        except Exception as e:  # Also of JAX, about results; the partitioner was done by then.
            error = e
        dump = read_dump(directory)
    if dump is not None:
        return dump
    if error is not None:
        raise EngineError(
            f"program {program.name!r} could not be partitioned for mesh {program.mesh}: "
            f"{(str(error).strip().splitlines() or [type(error).__name__])[0]}"
        ) from error
    raise EngineError(
        f"XLA wrote nothing down of how it partitioned program {program.name!r}: this version of "
        f"jaxlib ({jax.lib.__version__}) takes xla_dump_to otherwise, or {tempfile.gettempdir()} is "
        f"full"
    )


def _lowered(program: Program, topology: str) -> tuple[Any, dict[str, Any]]:
    """The program as JAX lowers it for a topology, or for this machine's devices where it is '', and XLA's options."""
    if not topology:
        engine = PjrtEngine(program.mesh)
        on_cpu = engine.jax_mesh.devices.flat[0].platform == "cpu"
        lowered = xla.trace(program, engine.jax_mesh).lower()
        return lowered, _CPU_OPTIONS if on_cpu else {}
    from lingvo_moe.analysis.programs.aot import aot

    return aot.lower_for_topology(program, topology), {}


@contextmanager
def _no_cache() -> Iterator[None]:
    """Disables the cache of compiled programs: a cached program would not be partitioned again."""
    directory = jax.config.jax_compilation_cache_dir
    if not directory:
        yield
        return
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()
