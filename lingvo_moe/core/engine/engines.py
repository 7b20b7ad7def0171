"""Makes the engine of a name."""

from lingvo_moe.core.config import checks
from lingvo_moe.core.engine.base import ENGINES, ONE_DEVICE_ENGINES, Engine, EngineError
from lingvo_moe.core.sharding import Mesh


def make_engine(name: str, mesh: Mesh, known_faults: str = "error") -> Engine:
    """The engine of that name.

    Args:
        known_faults: 'error', 'warn' or 'off': what `pjrt` does with a program that XLA's partitioner is
            known to compute wrongly; the others do not look for any.

    Raises:
        EngineError: there is none, or its devices do not fit the mesh.
    """
    checks.check_one_of("--engine", name, ENGINES, EngineError)
    if name == "pjrt":
        from lingvo_moe.core.engine.pjrt import PjrtEngine

        return PjrtEngine(mesh, known_faults=known_faults)
    if name in ONE_DEVICE_ENGINES:
        from lingvo_moe.core.engine.tf_engine import TfEngine

        return TfEngine(mesh, jit_compile=name == "tf")
    from lingvo_moe.core.engine.tpu_strategy import TpuStrategyEngine

    return TpuStrategyEngine(mesh)
