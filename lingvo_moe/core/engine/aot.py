"""Compiles a program ahead of time for a described TPU slice, with the real TPU compiler.

The compiler is part of libtpu and needs no TPU. It reports the memory that the program needs, in bytes, and
refuses a program that does not fit. The result cannot be run.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from lingvo_moe.core import units
from lingvo_moe.core.engine import xla
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.partition_dump import dump_options, read_before
from lingvo_moe.core.engine.program import Program
from lingvo_moe.core.quiet import quiet

# libtpu reads these when it is loaded: do not ask a cloud's metadata server about the machine, and do not
# claim the machine's TPUs, since several plans may be made at the same time.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
# The two cores of a v4 chip work as one, as JAX runs them; those of a v2 or v3 chip cannot.
_CHIP_CONFIG = {"v4": "megacore"}
_NAMES = "a name is a generation and the chips in each dimension, e.g. 'v3:32x32' or 'v4:4x4x8'"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"


class Holder(NamedTuple):
    """A large buffer, live at the peak, of a program that does not fit.

    Attributes:
        bytes: its size, including padding.
        op_name: the operation that it comes from, as far as the compiler knows; may be empty.
        shape: HLO's, e.g. 'f32[512,1024]{1,0:T(8,128)}'.
    """

    bytes: int
    op_name: str
    shape: str


class OutOfMemory(EngineError):
    """A program that needs more memory than a device has.

    Attributes:
        needed_bytes: bytes that it needs on one device, rounded as the compiler prints them.
        limit_bytes: bytes that a device has for a program, rounded likewise.
        holders: the largest buffers, largest first; empty if the compiler listed none, as when it
            rejects a program at once.
        compiler_message: the compiler's message.
        hlo_text: the scheduled module that did not fit; '' if the compiler left none.
    """

    def __init__(self, program: str, topology: str, compiler_message: str, hlo_text: str = ""):
        self.hlo_text = hlo_text
        self.needed_bytes, self.limit_bytes = _needed_and_limit(compiler_message)
        self.holders = _holders(compiler_message)
        self.compiler_message = compiler_message
        super().__init__(
            f"program {program!r} does not fit {topology}: it needs {units.size(self.needed_bytes)} on each"
            f" device, which has {units.size(self.limit_bytes)}; it misses by"
            f" {units.size(self.needed_bytes - self.limit_bytes)}"
        )


@dataclass(frozen=True)
class AotResult:
    """The compiler's results for a program, for one device.

    Attributes:
        hlo_text: the scheduled module.
        memory: bytes of arguments, outputs, aliased, temporaries, code, and peak (the compiler's figure
            for the most live bytes of arguments, outputs and temporaries).
        cost: XLA's cost analysis; a loop's body is counted once.
        compile_seconds: time to compile.
        host_peak_bytes: peak memory of this process so far.
        partitioner_input: the module that the SPMD partitioner was given; '' for one device.
    """

    hlo_text: str
    memory: dict[str, int]
    cost: dict[str, float]
    compile_seconds: float
    host_peak_bytes: int
    partitioner_input: str = ""


def devices_of(topology_name: str) -> tuple[Any, ...]:
    """The devices of a slice, e.g. 'v3:32x32' (generation, chips in each dimension), as JAX lists them.

    Raises:
        EngineError: libtpu is not installed, or knows no such slice.
    """
    return _describe(topology_name.strip())


def compiler_version() -> str:
    """The version of libtpu. Raises EngineError if it is not installed."""
    _check_installed()
    return importlib.metadata.version("libtpu")


def compiler_identity() -> str:
    """Identifies everything besides program and slice that affects compiling: versions and environment flags."""
    flags = "".join(os.environ.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"))
    mark = f"-{hashlib.sha256(flags.encode()).hexdigest()[:8]}" if flags else ""
    return f"libtpu-{compiler_version()}-jax-{jax.__version__}{mark}"


def compile_for_topology(program: Program, topology_name: str) -> AotResult:
    """Compiles a program for a slice; minutes for a large one.

    Logical device i is device i of `devices_of`.

    Raises:
        OutOfMemory: the program does not fit.
        EngineError: as `devices_of`; the program's mesh has another number of devices than the slice;
            or the compiler refuses the program.
    """
    devices = devices_of(topology_name)
    mesh = program.mesh
    if mesh.size != len(devices):
        raise EngineError(
            f"program {program.name!r} was lowered for mesh {mesh}, of {mesh.size} devices, but"
            f" {topology_name} has {len(devices)}; lower it for a mesh of {len(devices)}, or name"
            f" another topology"
        )
    start = time.perf_counter()
    jax_mesh = jax.sharding.Mesh(np.array(devices).reshape(mesh.shape), mesh.axis_names)
    lowered = xla.trace(program, jax_mesh).lower(lowering_platforms=("tpu",))
    before = ""
    try:
        if mesh.size == 1:
            compiled = lowered.compile()
        else:
            with tempfile.TemporaryDirectory(prefix="lingvo_moe_") as dump:
                compiled = lowered.compile(compiler_options=dump_options(dump))
                before = read_before(dump)
    except jax.errors.JaxRuntimeError as e:
        raise _error(program.name, topology_name, str(e), lowered) from None
    seconds = time.perf_counter() - start
    stats = compiled.memory_analysis()
    return AotResult(
        hlo_text=compiled.as_text(),
        memory=xla.memory(compiled)
        | {
            "code": int(stats.generated_code_size_in_bytes),
            "peak": int(stats.peak_memory_in_bytes),
        },
        cost=xla.cost(compiled),
        compile_seconds=seconds,
        host_peak_bytes=_host_peak_bytes(),
        partitioner_input=before,
    )


@functools.lru_cache(maxsize=8)
def _describe(name: str) -> tuple[Any, ...]:
    _check_installed()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not jax.config.jax_platforms:  # JAX was imported before the variable was set
        jax.config.update("jax_platforms", "cpu")
    if not name:  # libtpu would take a slice of its own choice
        raise EngineError(f"topology {name!r}: {_NAMES}")
    generation, _, dims = name.partition(":")
    options: dict[str, Any] = {}
    if generation in _CHIP_CONFIG:
        options["chip_config_name"] = _CHIP_CONFIG[generation]
    if re.fullmatch(r"1(x1)*", dims):  # by default hosts have 2x2 chips
        options["chips_per_host_bounds"] = [1, 1, 1]
    refusal = ""
    with quiet():
        try:
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=name, **options
            )
        except jax.errors.JaxRuntimeError as e:
            refusal = _first_line(str(e))
    if refusal:
        raise EngineError(
            f"topology {name!r}: the TPU compiler knows no such slice ({refusal}); {_NAMES}"
        )
    return tuple(description.devices)


def _check_installed() -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise EngineError(
            "the TPU compiler is not installed: pip install libtpu (requirements.txt names the version "
            "as jax[tpu]; it needs no TPU, and only Linux on x86-64 has it)"
        )


def _error(program: str, topology: str, message: str, lowered: Any) -> EngineError:
    if "RESOURCE_EXHAUSTED" in message and _LIMITS.search(message):
        return OutOfMemory(program, topology, message, _refused_module(lowered))
    return EngineError(
        f"the TPU compiler refuses program {program!r} for {topology}: {_first_line(message)}"
    )


def _refused_module(lowered: Any) -> str:
    """The scheduled module for which the compiler ran out of memory, or ''.

    The compiler writes it only if dumping is enabled, which is slow. So a program that does not fit is
    compiled again with dumping.
    """
    with tempfile.TemporaryDirectory() as dump:
        options = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered.compile(compiler_options=options)
        for path in sorted(Path(dump).glob("*.oom_intermediate_module.txt")):
            return path.read_text(encoding="utf-8", errors="replace")
    return ""


# The compiler reports either that the live bytes exceed HBM, before allocation, or the bytes used after it.
_LIMITS = re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)|Used {_SIZE} of {_SIZE} hbm")


def _needed_and_limit(message: str) -> tuple[int, int]:
    match = _LIMITS.search(message)
    assert match is not None, message
    groups = [g for g in match.groups() if g is not None]
    return _bytes(groups[0], groups[1]), _bytes(groups[2], groups[3])


def _holders(message: str) -> list[Holder]:
    holders = []
    for block in re.split(r"^\s*\d+\. (?=Size: )", message, flags=re.MULTILINE)[1:]:
        size = re.match(rf"Size: {_SIZE}", block)
        op_name = re.search(r'op_name="([^"]*)"', block)
        shape = re.search(r"Shape: (\S+)", block)
        if size:
            holders.append(
                Holder(
                    _bytes(*size.groups()),
                    op_name.group(1) if op_name else "",
                    shape.group(1) if shape else "",
                )
            )
    return sorted(holders, key=lambda h: -h.bytes)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _first_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return lines[0] if lines else ""


def _host_peak_bytes() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise EngineError("/proc/self/status does not say how much memory the process has had")
