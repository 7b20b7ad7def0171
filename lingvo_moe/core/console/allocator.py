"""The C library's memory of a command that moves large arrays."""

import ctypes

# Of malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 1 << 30  # bytes


def keep_freed_memory() -> None:
    """Has glibc keep what is freed, in one pool for all threads; without effect on other C libraries.

    Otherwise each array of more than 32 MB has fresh pages, which the system must clear: two fifths of the CPU's time
    of writing a checkpoint. To be called before threads begin.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE - 1)
