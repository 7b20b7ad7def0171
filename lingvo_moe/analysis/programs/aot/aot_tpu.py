"""Compiles for a described TPU slice with the real TPU compiler, which is part of libtpu and needs no TPU.

It reports the memory that a program needs, in bytes, and refuses a program that does not fit.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from lingvo_moe.analysis.programs.aot.aot_compiler import Compiler, first_line, use_cpu
from lingvo_moe.analysis.programs.aot.aot_result import Holder, OutOfMemory
from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.console.sigterm import keeping_sigterm
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.topology_names import TopologyName

# libtpu reads these when it is loaded: do not ask a cloud's metadata server about the machine, and do not
# claim the machine's TPUs, since several plans may be made at the same time.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
# The two cores of a v4 chip work as one, as JAX runs them; those of a v2 or v3 chip cannot.
_CHIP_CONFIG = {"v4": "megacore"}
_NAMES = "a name is a generation and the chips in each dimension, e.g. 'v3:32x32', and '*2' for two such slices"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
# The compiler reports either that the live bytes exceed HBM, before allocation, or the bytes used after it.
_LIMITS = re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)|Used {_SIZE} of {_SIZE} hbm")


class TpuCompiler(Compiler):
    """libtpu's compiler. A name is e.g. 'v3:32x32' (generation, chips in each dimension) or 'v5p:4x4x4*2' (two slices).

    Devices of several slices are ordered by slice, so that the first axis of a mesh crosses slices.
    """

    label = "the TPU compiler"
    platform = "tpu"
    environment = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")

    def Devices(self, topology: str) -> tuple[Any, ...]:
        return _describe(topology)

    def Versions(self) -> dict[str, str]:
        _check_installed()
        return {"libtpu": importlib.metadata.version("libtpu")}

    def Refusal(self, program: str, topology: str, message: str, lowered: Any) -> EngineError:
        if "RESOURCE_EXHAUSTED" in message and _LIMITS.search(message):
            return out_of_memory(program, topology, message, _refused_module(lowered))
        return super().Refusal(program, topology, message, lowered)


def out_of_memory(program: str, topology: str, message: str, hlo_text: str = "") -> OutOfMemory:
    """The error for a program that libtpu refuses for its size.

    `message` is libtpu's, which states both sizes; `hlo_text` is the refused module, if there is one.
    """
    needed, limit = _needed_and_limit(message)
    return OutOfMemory(
        program,
        topology,
        needed,
        limit,
        holders=_holders(message),
        compiler_message=message,
        hlo_text=hlo_text,
    )


@functools.lru_cache(maxsize=8)
def _describe(name: str) -> tuple[Any, ...]:
    _check_installed()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    use_cpu()
    parsed = TopologyName.parse(name)
    if not name or not parsed.slices:  # without a name libtpu would take a slice of its own choice
        raise EngineError(f"topology {name!r}: {_NAMES}")
    options: dict[str, Any] = {"num_slices": parsed.slices} if parsed.slices > 1 else {}
    if parsed.kind in _CHIP_CONFIG:
        options["chip_config_name"] = _CHIP_CONFIG[parsed.kind]
    if set(parsed.sizes) == {1}:  # by default hosts have 2x2 chips
        options["chips_per_host_bounds"] = [1, 1, 1]
    refusal = ""
    with quiet(), keeping_sigterm():
        try:
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=name.partition("*")[0], **options
            )
        except jax.errors.JaxRuntimeError as e:
            refusal = first_line(str(e))
    if refusal:
        raise EngineError(
            f"topology {name!r}: the TPU compiler knows no such slice ({refusal}); {_NAMES}"
        )
    # A slice's ids are consecutive.
    return tuple(sorted(description.devices, key=lambda device: device.id))


def _check_installed() -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise EngineError(
            "the TPU compiler is not installed: pip install 'jax[tpu]' (it needs no TPU, and only "
            "Linux on x86-64 has it)"
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
