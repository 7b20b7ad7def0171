"""Loads JAX's CUDA plugin for its compiler alone, and keeps JAX from loading it where it could not run anything.

JAX initialises every plugin that is installed when it first looks for devices. With the package of the compiler alone
(no NVIDIA libraries), this would load half a gigabyte into every process and print a traceback, since there is no CUDA.
"""

import functools
import importlib.metadata
import importlib.util
import logging
import sys
import types
from pathlib import Path

from lingvo_moe.core.engine.base import EngineError

PACKAGE = "jax-cuda12-pjrt"
_MODULE = "jax_plugins.xla_cuda12"
_RUNTIME = "jax_cuda12_plugin"  # the package of JAX's CUDA kernels, which a machine with GPUs has


def version() -> str:
    """The version of the package that holds the compiler.

    Raises EngineError: it is not installed; says what to install.
    """
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise EngineError(
            "the GPU compiler is not installed: pip install --no-deps -r requirements-gpu.txt (it needs no GPU and no"
            " NVIDIA libraries, takes 480 MB, and only Linux has it)"
        ) from None


def can_run() -> bool:
    """Whether JAX can use NVIDIA GPUs in this environment: both halves of its CUDA plugin are installed."""
    return importlib.util.find_spec(_RUNTIME) is not None


def hide() -> None:
    """Makes JAX pass over a plugin that has only the compiler; nothing happens where it could run programs."""
    if can_run() or _MODULE in sys.modules or importlib.util.find_spec("jax_plugins") is None:
        return
    inert = types.ModuleType(_MODULE)
    inert.__dict__["initialize"] = lambda: None
    sys.modules[_MODULE] = inert


@functools.cache
def load() -> None:
    """Registers the plugin with JAX, for its compiler. JAX does this by itself where the plugin is complete."""
    if can_run():
        return
    hide()
    directory = importlib.metadata.distribution(PACKAGE).locate_file(_MODULE.replace(".", "/"))
    spec = importlib.util.spec_from_file_location(
        "lingvo_moe_cuda_plugin", Path(str(directory)) / "__init__.py"
    )
    if spec is None or spec.loader is None:
        raise EngineError(f"the GPU compiler cannot be loaded from {directory}")
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    logging.getLogger(spec.name).setLevel(logging.ERROR)  # it misses the half that runs programs
    plugin.initialize()
