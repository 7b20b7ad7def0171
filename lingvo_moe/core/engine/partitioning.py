"""Gets the HLO text of a program before and after XLA's SPMD partitioner.

XLA can dump its module between passes. Two dumps are used: after sharding propagation, where every
instruction has its global shape and a sharding; and after partitioning, where it has the shape of one
device's part, and the collectives are inserted.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lingvo_moe.core.engine import xla
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.engine.program import Program

# The pass is called spmd-partitioning, on TPUs tpu-spmd-partitioning.
_BEFORE = "*.before_*spmd-partitioning.txt"
_AFTER = "*.after_*spmd-partitioning.before_*.txt"
_FINAL = ("*after_optimizations.txt", "*after_codegen.txt")
_OPTIONS: dict[str, Any] = {
    "xla_dump_hlo_as_text": True,
    "xla_dump_hlo_pass_re": ".*(spmd|shard).*",
}
# Nothing is run: machine code need not be fast.
_CPU_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclass(frozen=True)
class Partitioned:
    """A program's module at three points of its compilation.

    Attributes:
        before: after sharding propagation: global shapes, with a sharding on every instruction.
        after: after partitioning: one device's shapes, with collectives.
        final: the compiled module; '' if the compiler failed before that.
    """

    before: str
    after: str
    final: str


def partition(
    program: Program, devices: Sequence[Any] | None = None, topology: str = ""
) -> Partitioned:
    """Compiles a program for the devices of its mesh and returns its module before and after partitioning.

    Args:
        program: for any mesh.
        devices: of JAX; by default the first ones of this process.
        topology: a TPU slice, e.g. 'v3:2x2', to compile for ahead of time instead.

    Raises:
        EngineError: too few devices; no such slice; the compiler refused the program before it was
            partitioned, or wrote nothing down.
    """
    lowered, options = _lowered(program, devices, topology)
    error: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="lingvo_moe_") as directory:
        try:
            with _no_cache():
                lowered.compile(compiler_options=options | {"xla_dump_to": directory})
        except Exception as e:  # Also of JAX, about results; the partitioner was done by then.
            error = e
        found = _read(Path(directory))
    if found is not None:
        return found
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


def _lowered(
    program: Program, devices: Sequence[Any] | None, topology: str
) -> tuple[Any, dict[str, Any]]:
    if not topology:
        engine = PjrtEngine(program.mesh, devices)
        on_cpu = engine.jax_mesh.devices.flat[0].platform == "cpu"
        lowered = xla.trace(program, engine.jax_mesh).lower()
        return lowered, _OPTIONS | (_CPU_OPTIONS if on_cpu else {})
    from lingvo_moe.core.engine import aot

    found = aot.devices_of(topology)
    if len(found) != program.mesh.size:
        raise EngineError(
            f"program {program.name!r} was lowered for mesh {program.mesh}, of {program.mesh.size} "
            f"devices, but {topology} has {len(found)}"
        )
    grid = np.array(found).reshape(program.mesh.shape)
    jax_mesh = jax.sharding.Mesh(grid, program.mesh.axis_names)
    return xla.trace(program, jax_mesh).lower(lowering_platforms=("tpu",)), dict(_OPTIONS)


def _read(directory: Path) -> Partitioned | None:
    """The largest dumped module, or None if there is none."""
    after = _largest(directory, _AFTER)
    if after is None:
        return None
    module = after.name.split(".")[0]
    before = _largest(directory, f"{module}{_BEFORE}")
    finals = [_largest(directory, f"{module}{pattern}") for pattern in _FINAL]
    final = next((path for path in finals if path is not None), None)
    if before is None:
        return None
    return Partitioned(_text(before), _text(after), _text(final) if final else "")


def _largest(directory: Path, pattern: str) -> Path | None:
    return max(directory.glob(pattern), key=lambda path: path.stat().st_size, default=None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


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
