"""TensorFlow alone, on one device: `tf` compiles by XLA, `tf_graph` runs TensorFlow's own kernels.

For debugging, serving, and as the reference in tests. On a CPU `tf_graph` is also the fastest engine:
its matrix products are oneDNN's, which are faster than XLA:CPU's (docs/speed.md).
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.engine.base import Compiled, Engine, EngineError
from lingvo_moe.core.engine.lowering.sources import failed_operation
from lingvo_moe.core.engine.lowering.specs import TensorSpec, map_with_specs
from lingvo_moe.core.engine.lowering.tracing import Traced, trace
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from lingvo_moe.core.sharding.letters import HOST
from lingvo_moe.core.task.step import Step


class TfEngine(Engine):
    """Runs functions as `tf.function`s that XLA compiles; tensors are eager ones."""

    NAME, ONE_DEVICE = "tf", True

    def __init__(self, mesh: Mesh | str | None = None):
        """Raises EngineError for a mesh of more than one device."""
        _report_fallback_silently()
        self.mesh = Mesh.parse(mesh, "TfEngine: mesh") if mesh else single_device()
        if self.mesh.size != 1:
            raise EngineError(
                f"--engine={self.NAME} runs on one device, not on mesh {self.mesh} of {self.mesh.size}; use "
                f"--engine=pjrt, or --mesh={self.mesh.axis_names[0]}:1"
            )

    @classmethod
    def RunsOnCpu(cls) -> bool:
        return not any(tf.config.list_physical_devices(kind) for kind in ("GPU", "TPU"))

    @classmethod
    def DeviceKind(cls) -> str:
        for device in tf.config.list_physical_devices("GPU"):
            return tf.config.experimental.get_device_details(device).get("device_name", "")
        return "TPU" if tf.config.list_physical_devices("TPU") else ""

    def BuildStep(self, step: Step) -> "CompiledTfFunction":
        self.doing(f"tracing {step.name}")
        traced = trace(step, self.mesh, self.XLA)
        if any(spec.memory == HOST for spec in traced.signature.args):
            raise EngineError(
                f"--engine={self.NAME}: TensorFlow's own programs have one memory; train.offload takes --engine=pjrt"
            )
        return CompiledTfFunction(traced, self.XLA)

    def Put(self, tree: Any, specs: Any) -> Any:
        return map_with_specs(_to_tensor, tree, specs)


class TfGraphEngine(TfEngine):
    """Runs functions as `tf.function`s by TensorFlow's own kernels."""

    NAME, XLA = "tf_graph", False

    def Once(self, step: Step, *args: Any) -> Any:
        # Eagerly: to trace a graph and to optimise it takes TensorFlow ten times as long as to run its operations once.
        trees = [self.Put(tree, specs) for tree, specs in zip(args, step.arg_specs, strict=True)]
        with use_mesh(self.mesh), kernels.using(tensorflow):
            return self.Put(step.fn(*trees), step.results)


class CompiledTfFunction(Compiled):
    """A traced function; XLA compiles it at the first call, where it does."""

    def __init__(self, traced: Traced, jit_compile: bool):
        self.function, self.signature, self._graph = traced.function, traced.signature, traced.graph
        self._jit_compile = jit_compile
        self.first_call = "XLA compiles it" if jit_compile else "TensorFlow optimises its graph"

    def Run(self, leaves: Sequence[Any]) -> Iterable[Any]:
        try:
            return self.function(*map(_to_tensor, leaves, self.signature.args))
        except tf.errors.OpError as e:
            if why := failed_operation(e.message, self._graph):
                raise EngineError(why) from e
            raise

    def HloText(self) -> str:
        if not self._jit_compile:
            raise EngineError(
                "--engine=tf_graph has no HLO text, since XLA compiles only small pieces of it; use tf"
            )
        specs = [tf.TensorSpec(s.shape, s.dtype) for s in self.signature.args]
        return self.function.experimental_get_compiler_ir(*specs)(stage="optimized_hlo")


@functools.cache
def _report_fallback_silently() -> None:
    """Lets TensorFlow say, where nobody reads it, that oneDNN does not transpose integers.

    It logs that once in a process, as an error (`E0000 ... oneDNN supports DT_INT32 only on ...`), and uses another
    kernel, as it should. Real errors stay visible.
    """
    with quiet(), tf.device("CPU:0"):
        tf.function(tf.transpose)(tf.ones([2, 2], tf.int32))


def _to_tensor(value: Any, spec: TensorSpec) -> tf.Tensor:
    if not isinstance(value, tf.Tensor):
        return tf.convert_to_tensor(spec.ToNumpy(value))
    spec.Check(value.shape, value.dtype)
    return value
