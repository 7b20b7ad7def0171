"""The engine on TensorFlow's own TPU runtime: TPUStrategy with SPMD partitioning, one replica over all cores.

NOT RUN BY US: we had no TPU. Tests cover the device assignment and the errors, which need none. Arguments
and results of a function are unsharded here; XLA shards the tensors inside by the annotations.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.engine.base import Compiled, Engine, EngineError
from lingvo_moe.core.engine.lowering.specs import map_with_specs
from lingvo_moe.core.engine.lowering.tracing import Traced, trace
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.step import Step


class TpuStrategyEngine(Engine):
    """Runs functions by `TPUStrategy.run`, with one replica, on the TPU that TensorFlow can reach."""

    NAME = "tpu_strategy"

    def __init__(self, mesh: Mesh):
        """Raises EngineError: this machine has no TPU, or the mesh does not fit its cores."""
        self.mesh = mesh
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
            topology = tf.tpu.experimental.initialize_tpu_system(resolver)
        except (ValueError, RuntimeError, tf.errors.OpError) as e:
            raise EngineError(
                "--engine=tpu_strategy: TensorFlow finds no TPU on this machine "
                f"({str(e).splitlines()[0][:120]}); --engine=pjrt runs on CPUs, GPUs and TPUs"
            ) from None
        self.strategy = tf.distribute.TPUStrategy(
            resolver,
            experimental_device_assignment=device_assignment(topology, mesh),
            experimental_spmd_xla_partitioning=True,
        )

    @classmethod
    def RunsOnCpu(cls) -> bool:
        return False

    @classmethod
    def DeviceKind(cls) -> str:
        return "TPU"

    def BuildStep(self, step: Step) -> "CompiledTpuFunction":
        return CompiledTpuFunction(self.strategy, trace(step, self.mesh))

    def Put(self, tree: Any, specs: Any) -> Any:
        return map_with_specs(lambda value, _spec: tf.convert_to_tensor(value), tree, specs)


class CompiledTpuFunction(Compiled):
    """A function that the strategy's one replica runs."""

    def __init__(self, strategy: Any, traced: Traced):
        self.signature = traced.signature

        @tf.function(autograph=False)
        def run(*leaves: tf.Tensor) -> Any:
            # The strategy compiles; a nested jit_compile is not allowed there.
            return strategy.run(traced.function.python_function, args=leaves)

        self._run = run

    def Run(self, leaves: Sequence[Any]) -> Iterable[Any]:
        return self._run(*map(tf.convert_to_tensor, leaves))


def device_assignment(topology: Any, mesh: Mesh) -> Any:
    """All cores of a `tf.tpu.experimental.Topology` as the logical devices of one replica.

    Raises EngineError: the mesh has another number of devices than the topology has cores.
    """
    cores = int(np.prod(topology.mesh_shape))
    if mesh.size != cores:
        raise EngineError(
            f"mesh {mesh} has {mesh.size} devices, but the TPU has {cores} cores; "
            f"give e.g. --mesh={mesh.axis_names[-1]}:{cores}"
        )
    return tf.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=topology.mesh_shape, num_replicas=1
    )
