"""Keeps the process's way with SIGTERM where a library takes it over, as libtpu does to print a crash."""

import contextlib
import ctypes
import signal
from collections.abc import Iterator

# Python's own `signal.signal` works in the main thread alone.
_get, _set = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
_get.restype = _set.restype = ctypes.c_void_p
_get.argtypes, _set.argtypes = [ctypes.c_int], [ctypes.c_int, ctypes.c_void_p]


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Restores what SIGTERM does after a library was loaded inside the block."""
    handler = _get(signal.SIGTERM)
    try:
        yield
    finally:
        _set(signal.SIGTERM, handler)
