"""Compiles a program ahead of time for a machine that is not there: a TPU slice or a GPU cluster.

The real compilers do it, which need no device: libtpu's for TPUs, that of JAX's CUDA plugin for GPUs. They report the
memory that the program needs, in bytes; a program that does not fit is an error. The result cannot be run.
"""

import hashlib
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lingvo_moe.analysis.programs.aot.aot_compiler import Compiler
from lingvo_moe.analysis.programs.aot.aot_gpu import GpuCompiler
from lingvo_moe.analysis.programs.aot.aot_result import AotResult, OutOfMemory as OutOfMemory
from lingvo_moe.analysis.programs.aot.aot_tpu import TpuCompiler
from lingvo_moe.analysis.programs.aot.partition_dump import dump_options, read_before
from lingvo_moe.core.engine import xla
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.sharding.letters import HOST
from lingvo_moe.core.topology_names import TopologyName

_TPU = TpuCompiler()
_GPU = GpuCompiler()


def devices_of(topology_name: str) -> tuple[Any, ...]:
    """The devices of a slice, e.g. 'v3:32x32', of several, e.g. 'v5p:4x4x4*2', or of a cluster, e.g. 'h100:32x8'.

    They are in the order of the mesh: those of the first slice or node come first.

    Raises:
        EngineError: the compiler is not installed, or knows no such machine.
    """
    name = topology_name.strip()
    return _compiler_of(name).Devices(name)


def compiler_versions(topology_name: str) -> dict[str, str]:
    """The packages that hold a topology's compiler, with their versions. Raises EngineError without them."""
    return _compiler_of(topology_name).Versions()


def compiler_identity(topology_name: str) -> str:
    """Identifies what affects compiling besides program and topology: versions, flags, the description of a card."""
    compiler = _compiler_of(topology_name)
    versions = "-".join(f"{name}-{version}" for name, version in compiler.Versions().items())
    flags, mark = compiler.Flags(), compiler.Mark(topology_name)
    marks = [f"-{mark}"] if mark else []
    if flags:
        marks.append(f"-{hashlib.sha256(flags.encode()).hexdigest()[:8]}")
    return f"{versions}-jax-{jax.__version__}{''.join(marks)}"


def lower_for_topology(program: Program, topology_name: str) -> Any:
    """A `jax.stages.Lowered` of a program for a topology. Logical device i is device i of `devices_of`.

    Raises EngineError: as `devices_of`; or the program's mesh has another number of devices than the topology.
    """
    devices = devices_of(topology_name)
    mesh = program.mesh
    if mesh.size != len(devices):
        raise EngineError(
            f"program {program.name!r} was lowered for mesh {mesh}, of {mesh.size} devices, but"
            f" {topology_name} has {len(devices)}; lower it for a mesh of {len(devices)}, or name"
            f" another topology"
        )
    jax_mesh = jax.sharding.Mesh(np.array(devices).reshape(mesh.shape), mesh.axis_names)
    platform = _compiler_of(topology_name).platform
    lowered = xla.trace(program, jax_mesh).lower(lowering_platforms=(platform,))
    if any(spec.memory == HOST for spec in program.signature.args):
        xla.place_arguments(lowered, program)
    return lowered


def compile_for_topology(program: Program, topology_name: str) -> AotResult:
    """Compiles a program for a topology; minutes for a large one.

    Raises:
        OutOfMemory: the program does not fit.
        EngineError: as `lower_for_topology`; or the compiler refuses the program.
    """
    compiler = _compiler_of(topology_name)
    start = time.perf_counter()
    lowered = lower_for_topology(program, topology_name)
    compiled, before = _compiled(compiler, program, topology_name, lowered)
    seconds = time.perf_counter() - start
    stats = compiled.memory_analysis()
    on_host = {
        "host_arguments": int(stats.host_argument_size_in_bytes),
        "host_temporaries": int(stats.host_temp_size_in_bytes),
    }
    memory = xla.memory(compiled) | {"code": int(stats.generated_code_size_in_bytes)}
    memory["peak"] = _peak(int(stats.peak_memory_in_bytes), memory, on_host)
    memory |= {name: size for name, size in on_host.items() if size}
    result = AotResult(
        hlo_text=compiled.as_text(),
        memory=memory | {"needed": compiler.Needed(memory)},
        cost=xla.cost(compiled),
        compile_seconds=seconds,
        host_peak_bytes=_host_peak_bytes(),
        partitioner_input=before,
    )
    misfit = compiler.Misfit(program.name, topology_name, result)
    if misfit is not None:
        raise misfit
    return result


def _peak(reported: int, memory: Mapping[str, int], on_host: Mapping[str, int]) -> int:
    """The most bytes that are live on a device at a time.

    libtpu's figure counts what is in the memory of the host too. The host's arguments are always there; which of its
    temporaries are live at that time is not known, so that this may be more than the device needs. But it never needs
    more than all of its arguments, results and temporaries.
    """
    peak = reported - on_host["host_arguments"]
    if not on_host["host_temporaries"]:
        return peak
    whole = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]
    return min(peak, whole)


def _compiled(compiler: Compiler, program: Program, topology: str, lowered: Any) -> tuple[Any, str]:
    """The compiled program, and the module that its partitioner was given."""
    refusal = ""
    with tempfile.TemporaryDirectory(prefix="lingvo_moe_") as dump:
        options = compiler.Options() | (dump_options(dump) if program.mesh.size > 1 else {})
        try:
            return lowered.compile(compiler_options=options or None), read_before(dump)
        except jax.errors.JaxRuntimeError as e:
            refusal = str(e)
    raise compiler.Refusal(program.name, topology, refusal, lowered)


def _compiler_of(topology: str) -> Compiler:
    return _TPU if TopologyName.parse(topology).is_tpu else _GPU


def _host_peak_bytes() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise EngineError("/proc/self/status does not say how much memory the process has had")
