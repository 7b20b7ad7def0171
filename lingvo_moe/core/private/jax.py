"""The private parts of JAX that the engines use, and the replacements of its functions while they run.

JAX may change any of them in a minor version; `tests/core/private/test_private_jax.py` then fails. No other file
imports from `jax._src` or `jaxlib`.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any, Protocol

from jax._src import compilation_cache, distributed
from jax._src.lib import _jax, _profiler
from jax.extend.backend import clear_backends

# MLIR in Python: JAX has it, but documents nothing of it.
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

__all__ = ["func", "ir", "stablehlo"]


class JobState(Protocol):
    """This process in its job of several: `client` is None where there is no job."""

    client: Any
    process_id: int
    num_processes: int
    coordinator_address: str | None


_services: list[Any] = []


def job_state() -> JobState:
    """The state that jax.distributed.initialize changes."""
    return distributed.global_state


def leave_job() -> None:
    """Leaves the job that this process has joined, so that it can join another. Its arrays and devices are gone before.

    The service of process 0 stays to the end of the process: where it ends, JAX aborts those that have not left yet.
    """
    state = distributed.global_state
    _services.append(state.service)
    client, state.client, state.service = state.client, None, None
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None
    client.shutdown()


def forget_devices() -> None:
    """Gives up JAX's devices, and the connections of this process to others, which Python objects keep alive.

    What is on the devices, and programs for them, has to be gone.
    """
    clear_backends()
    for cache in gc.get_objects():  # keyed by meshes, some of them by private functions
        if isinstance(cache, functools._lru_cache_wrapper) and cache.__module__.startswith("jax"):
            cache.cache_clear()
    gc.collect()


def hlo_to_stablehlo(hlo: bytes) -> bytes:
    """Translates a serialized HloModuleProto into StableHLO as bytecode."""
    return _jax.mlir.hlo_to_stablehlo(hlo)


def export_trace(space: bytes, directory: str) -> None:
    """Writes the serialized XSpace of any profiler as jax.profiler.stop_trace writes its own, with a Chrome trace."""
    _profiler.ProfilerSession().export(space, directory)


class Cache(Protocol):
    """A store of compiled programs, by key."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> None: ...


def use_cache(make: Callable[[str], Cache]) -> None:
    """Makes JAX keep compiled programs in `make(directory)`."""
    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = lambda path: (make(path), path)


def watch_cache(may_keep: Callable[[], bool], on_hit: Callable[[], None]) -> None:
    """Makes JAX keep a program that was compiled only if `may_keep()`, and call `on_hit()` for each that the
    cache had. An entry whose program cannot be loaded is no hit: JAX compiles it again."""
    put, get = (
        compilation_cache.put_executable_and_time,
        compilation_cache.get_executable_and_time,
    )

    def put_if_kept(*args: Any, **kwargs: Any) -> None:
        if may_keep():
            put(*args, **kwargs)

    def get_and_tell(*args: Any, **kwargs: Any) -> Any:
        executable, seconds = get(*args, **kwargs)
        if executable is not None:
            on_hit()
        return executable, seconds

    compilation_cache.put_executable_and_time = put_if_kept
    compilation_cache.get_executable_and_time = get_and_tell
