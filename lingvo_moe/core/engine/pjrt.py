"""The engine that runs programs through PJRT: any number of devices, of one or several processes.

XLA's SPMD partitioner partitions the program for the devices: virtual CPU devices, GPUs or TPUs.
Importing this module does not import TensorFlow; building from a TensorFlow function does.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lingvo_moe.core.console import units
from lingvo_moe.core.engine import gpu_settings, kept_programs, xla
from lingvo_moe.core.engine.base import Compiled, Engine, EngineError
from lingvo_moe.core.engine.devices import has_fused_kernels
from lingvo_moe.core.engine.lowering.jax_shardings import named_sharding
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.specs import TensorSpec, map_with_specs
from lingvo_moe.core.engine.program_analysis import (
    ERROR,
    Collective,
    check_action,
    program_analysis,
)
from lingvo_moe.core.files.paths import check_local
from lingvo_moe.core.files.store import LocalStore
from lingvo_moe.core.nested_map import NestedMap, flatten_items, pack, skeleton
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.step import Step

# XLA's options for programs on CPUs; what Compile is given goes before them.
_CPU_OPTIONS = {
    # How long a virtual device waits for the others in a collective before XLA aborts the process.
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
    # Products are faster by Eigen than by YNNPACK, the default; sums stay with YNNPACK (docs/speed.md).
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
}


class PjrtEngine(Engine):
    """Runs programs on the devices that JAX sees.

    Attributes:
        jax_mesh: the devices in the mesh's shape; logical device i is `devices[i]`.
    """

    NAME, PJRT, SEVERAL_PROCESSES = "pjrt", True, True

    def __init__(
        self, mesh: Mesh | str, devices: Sequence[Any] | None = None, known_faults: str = ERROR
    ):
        """Makes the engine; compiles nothing.

        Args:
            devices: in logical order; by default the first ones that JAX lists.
            known_faults: what to do with a program that XLA's partitioner is known to compute wrongly:
                one of `program_analysis.ACTIONS`.

        Raises:
            EngineError: there are fewer devices than the mesh has, or other processes would hold
                none of it.
            ShardingError: `known_faults` is no such action.
        """
        check_action(known_faults)
        mesh = Mesh.parse(mesh, "PjrtEngine: mesh")
        self.mesh, self.known_faults = mesh, known_faults
        self._texts: LocalStore | None = None  # see DumpPrograms
        self._dumped = 0
        gpu_settings.prepare()
        available = list(devices) if devices is not None else jax.devices()
        if mesh.size > len(available):
            raise EngineError(_misfit(mesh, available))
        used = available[: mesh.size]
        idle = set(range(jax.process_count())) - {d.process_index for d in used}
        if idle:
            raise EngineError(
                f"mesh {mesh} has {mesh.size} devices, but the job has {len(available)} in "
                f"{jax.process_count()} processes, and process {min(idle)} would have none of it; "
                f"give a mesh of {len(available)} devices, e.g. {_suggest(mesh, len(available))}"
            )
        self.jax_mesh = jax.sharding.Mesh(np.array(used).reshape(mesh.shape), mesh.axis_names)
        self._fused = has_fused_kernels(used[0])
        self.has_host_memory = used[0].platform != "cpu"

    @classmethod
    def RunsOnCpu(cls) -> bool:
        return jax.devices()[0].platform == "cpu"

    @classmethod
    def DeviceKind(cls) -> str:
        return jax.devices()[0].device_kind

    @classmethod
    def DeviceBytes(cls) -> int | None:
        return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")

    @classmethod
    def PeakBytes(cls) -> int | None:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        return max(filter(None, (s.get("peak_bytes_in_use") for s in stats)), default=None)

    def BuildStep(self, step: Step) -> "CompiledProgram":
        # A program with a fault is not kept, since only a new one knows the lines of its operations.
        key = ""
        if self.known_faults == ERROR:
            key = kept_programs.key_of(step, self.mesh, self._fused)
        program = kept_program = kept_programs.find(key)
        if program is None:
            # The door to TensorFlow.
            from lingvo_moe.core.engine.lowering.lowering import lower_step

            self.doing(f"lowering {step.name}")
            program = lower_step(step, self.mesh, self._fused)
        self.doing(f"compiling {step.name}, {units.size(len(program.exported))} of StableHLO")
        compiled = self.Compile(program)
        if kept_program is None:
            kept_programs.keep(key, program)
        return compiled

    def Compile(
        self, program: Program, options: Mapping[str, Any] | None = None
    ) -> "CompiledProgram":
        """Compiles a program for this engine's devices, with XLA's own options if any are given.

        Raises:
            EngineError: the program was lowered for another mesh.
            ShardingError: XLA's partitioner is known to compute some of it wrongly (names lines and
                remedies); or a result that was left to the partitioner is sharded in a way that the
                mesh's axes cannot name.
        """
        if (program.mesh.axis_names, program.mesh.shape) != (self.mesh.axis_names, self.mesh.shape):
            raise EngineError(
                f"program {program.name!r} was lowered for mesh {program.mesh}, not for {self.mesh}; "
                f"make the engine with that mesh, or lower it again"
            )
        compiled = CompiledProgram(program, self, options)
        if self._texts:
            self._dumped += 1
            start = f"{self._dumped:02d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', program.name)}"
            self._texts.Write(f"{start}.stablehlo.mlir", program.Text().encode())
            self._texts.Write(f"{start}.hlo.txt", compiled.HloText().encode())
        return compiled

    def DumpPrograms(self, directory: str) -> None:
        check_local(directory, "--dump_programs")
        self._texts = LocalStore(directory)

    def Sharding(self, spec: TensorSpec) -> Any:
        return named_sharding(spec, self.mesh, self.jax_mesh)

    def Put(self, tree: Any, specs: Any) -> Any:
        return map_with_specs(self.PutLeaf, tree, specs)

    def PutLeaf(self, value: Any, spec: TensorSpec) -> jax.Array:
        """One tensor on the devices, as its spec says.

        Raises SpecError: another shape, or a dtype that would have to be converted.
        """
        sharding = self.Sharding(spec)
        if isinstance(value, jax.Array):
            spec.Check(value.shape, value.dtype)
            return value if value.sharding == sharding else jax.device_put(value, sharding)
        array = spec.ToNumpy(value)
        return jax.make_array_from_callback(spec.shape, sharding, lambda index: array[index])

    def Get(self, tree: Any) -> Any:
        return pack(skeleton(tree), [_get(leaf) for _, leaf in flatten_items(tree)])

    def OwnRows(self, specs: NestedMap) -> Collection[int] | None:
        numbers = set[int]()
        for path, spec in specs.FlattenItems():
            if spec.has_rows:
                rows, sharding = range(spec.shape[0]), self.Sharding(TensorSpec.Of(spec, path))
                for index in sharding.addressable_devices_indices_map(spec.shape).values():
                    numbers.update(rows[index[0]])
        return numbers

    def Most(self, value: float) -> float:
        if jax.process_count() == 1:
            return value
        return float(multihost_utils.process_allgather(np.float32(value)).max())


class CompiledProgram(Compiled):
    """A program compiled for an engine's devices."""

    def __init__(
        self, program: Program, engine: PjrtEngine, options: Mapping[str, Any] | None = None
    ):
        self.program, self.signature, self._engine = program, program.signature, engine
        # Virtual devices share the cores: steps in flight would only queue while their collectives
        # wait on each other, and a device that computes for long is no reason to give up the run.
        platform = engine.jax_mesh.devices.flat[0].platform
        self._wait = platform == "cpu"
        options = {**_default_options(platform), **(options or {})}
        self._compiled = xla.compile_for(program, engine.jax_mesh, options, engine.known_faults)

    def Run(self, leaves: Sequence[Any]) -> Iterable[Any]:
        out = self._compiled(*map(self._engine.PutLeaf, leaves, self.signature.args))
        if self._wait:
            jax.block_until_ready(out)
        return out

    def HloText(self) -> str:
        return self._compiled.as_text()

    def Collectives(self) -> list[Collective]:
        return program_analysis().parse_collectives(self.HloText())

    def Memory(self) -> dict[str, int]:
        return xla.memory(self._compiled)

    def Cost(self) -> dict[str, float]:
        """XLA's cost analysis for one device ('flops', 'bytes accessed', ...); a loop's body is counted once."""
        return xla.cost(self._compiled)


def _default_options(platform: str) -> Mapping[str, Any]:
    """XLA's options for programs on a kind of device, as JAX names it: 'cpu', 'gpu' or 'tpu'."""
    if platform == "cpu":
        return _CPU_OPTIONS
    return gpu_settings.compiler_options() if platform == gpu_settings.PLATFORM else {}


def _get(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def _misfit(mesh: Mesh, devices: Sequence[Any]) -> str:
    count, platform = len(devices), devices[0].platform
    text = (
        f"mesh {mesh} needs {mesh.size} devices, but there are {count} ({platform}); "
        f"a mesh that fits: {_suggest(mesh, count)}"
    )
    if platform == "cpu":
        text += f"; or make virtual CPU devices: --num_devices={mesh.size}, or request_cpu_devices({mesh.size})"
    return text


def _suggest(mesh: Mesh, count: int) -> str:
    """The mesh with its last axis resized to `count` devices in all, or one axis if that does not divide."""
    rest = mesh.size // mesh.shape[-1]
    if count % rest == 0:
        return str(Mesh(mesh.axis_names, (*mesh.shape[:-1], count // rest)))
    return f"{mesh.axis_names[-1]}:{count}"
