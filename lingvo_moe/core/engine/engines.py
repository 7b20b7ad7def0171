"""The engines by name: those of this package, and those that others register."""

import importlib

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.command import say
from lingvo_moe.core.engine.base import Engine, EngineError
from lingvo_moe.core.engine.program_analysis import ERROR, check_action
from lingvo_moe.core.sharding import Mesh

# By name, the class, or its module and name: it is imported when it is asked for.
ENGINES: dict[str, type[Engine] | tuple[str, str]] = {
    "pjrt": ("lingvo_moe.core.engine.pjrt", "PjrtEngine"),
    "tf": ("lingvo_moe.core.engine.tf_engine", "TfEngine"),
    "tf_graph": ("lingvo_moe.core.engine.tf_engine", "TfGraphEngine"),
    "tpu_strategy": ("lingvo_moe.core.engine.tpu_strategy", "TpuStrategyEngine"),
}


def Register(cls: type[Engine]) -> type[Engine]:
    """Class decorator: makes an engine known by its NAME, as a value of --engine. Raises EngineError: it is taken."""
    if cls.NAME in ENGINES:
        raise EngineError(f"{cls.__name__}: NAME={cls.NAME!r} is that of another engine")
    ENGINES[cls.NAME] = cls
    return cls


def engine_class(name: str) -> type[Engine]:
    """The class of an engine, which says what it can do. Raises EngineError: there is none of that name."""
    checks.check_one_of("--engine", name, tuple(ENGINES), EngineError)
    place = ENGINES[name]
    if not isinstance(place, tuple):
        return place
    module, attribute = place
    return getattr(importlib.import_module(module), attribute)


def make_engine(name: str, mesh: Mesh, known_faults: str = ERROR) -> Engine:
    """Makes the engine of a name.

    Args:
        known_faults: 'error', 'warn' or 'off': what an engine that runs through PJRT does with a program that XLA's
            partitioner is known to compute wrongly; the others do not look for any.

    Raises:
        EngineError: there is none of that name, or its devices do not fit the mesh.
        ShardingError: `known_faults` is none of the three.
    """
    check_action(known_faults)
    engine = engine_class(name)(mesh)
    engine.known_faults = known_faults
    return engine


def engine_for_inference(
    params: Params, text: str, num_devices: int, quiet: bool = False
) -> tuple[Engine, Params]:
    """Makes the engine over whose devices a model is to be scored or to search; see laid_for_inference.

    Programs are kept, see compiled_cache.py. The first process of a job says which it makes, unless `quiet`.

    Args:
        params: the experiment's.
        text: the value of --mesh; '' for train.mesh, laid over `num_devices`.

    Returns:
        The engine, and the experiment's Params with the task as it lies over its mesh.

    Raises:
        EngineError, ShardingError: the devices do not fit the mesh, or the model does not.
    """
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.engine.compiled_cache import enable_compilation_cache
    from lingvo_moe.core.task.meshes import laid_for_inference

    enable_compilation_cache()
    mesh, laid = laid_for_inference(params, text, num_devices)
    engine = make_engine("pjrt", mesh)
    if not (quiet or devices.process_index()):
        engine.doing = lambda doing: say(f"{doing} ...")
    return engine, laid
