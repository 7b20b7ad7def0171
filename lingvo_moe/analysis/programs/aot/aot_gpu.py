"""Compiles for a described GPU cluster with XLA's own GPU compiler, which needs neither a GPU nor NVIDIA's libraries.

The compiler comes with JAX's CUDA plugin. It does not refuse a program that is too large, so its figures are compared
with the memory that a card has for programs. Nothing that it compiles here was ever run.
"""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from lingvo_moe.analysis.programs.aot.aot_compiler import Compiler, first_line, use_cpu
from lingvo_moe.analysis.programs.aot.aot_result import AotResult, OutOfMemory
from lingvo_moe.analysis.programs.aot.gpu_targets import TARGETS, GpuTarget
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.engine import cuda_plugin, gpu_settings
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.gpu_memory import usable_bytes
from lingvo_moe.core.topology_names import TopologyName

_NAMES = "a name is a card, the nodes and the GPUs of a node, e.g. 'h100:32x8'"


class GpuCompiler(Compiler):
    """XLA's GPU compiler. A name is e.g. 'h100:32x8' (card, nodes, GPUs of a node)."""

    label = "the GPU compiler"
    platform = "cuda"
    environment = ("XLA_FLAGS",)

    def Devices(self, topology: str) -> tuple[Any, ...]:
        return _describe(topology)

    def Versions(self) -> dict[str, str]:
        return {cuda_plugin.PACKAGE: cuda_plugin.version()}

    def Options(self) -> dict[str, bool]:
        """The compiler options that the trainer gives its programs on GPUs."""
        return gpu_settings.compiler_options()

    def Mark(self, topology: str) -> str:
        """A hash of the card's description and the options: others may compile to another program."""
        described = f"{_target(topology).Text()}{sorted(self.Options().items())}"
        return hashlib.sha256(described.encode()).hexdigest()[:8]

    def Needed(self, memory: Mapping[str, int]) -> int:
        """See the base class. XLA allocates all temporaries at once, so their sum counts and not the live bytes."""
        return memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]

    def Misfit(self, program: str, topology: str, result: AotResult) -> OutOfMemory | None:
        limit = usable_bytes(_target(topology).memory_bytes)
        needed = result.memory["needed"]
        if needed <= limit:
            return None
        return OutOfMemory(program, topology, needed, limit, hlo_text=result.hlo_text)


def _target(topology: str) -> GpuTarget:
    """The description of a topology's card. Raises EngineError if there is none."""
    card = TopologyName.parse(topology).kind
    if card not in TARGETS:
        raise EngineError(
            f"topology {topology!r}: the GPU compiler has no description of a card"
            f" {card!r}{did_you_mean(card, TARGETS)}; {_NAMES}"
        )
    return TARGETS[card]


@functools.lru_cache(maxsize=8)
def _describe(topology: str) -> tuple[Any, ...]:
    target, parsed = _target(topology), TopologyName.parse(topology)
    if len(parsed.sizes) != 2 or parsed.slices != 1:
        raise EngineError(f"topology {topology!r}: {_NAMES}")
    nodes, gpus = parsed.sizes
    cuda_plugin.version()  # raises if it is not installed
    use_cpu()
    refusal = ""
    with quiet():  # the compiler says that it finds no driver
        cuda_plugin.load()
        try:
            description = topologies.get_topology_desc(
                platform="cuda", target_config=target.Text(), topology=f"1x{nodes}x{gpus}"
            )
        except jax.errors.JaxRuntimeError as e:
            refusal = first_line(str(e))
    if refusal:
        raise EngineError(
            f"topology {topology!r}: the GPU compiler refuses its description ({refusal})"
        )
    return tuple(description.devices)
