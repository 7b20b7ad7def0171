"""Names what this machine's processor can do."""

import contextlib
import functools
import platform


@functools.cache
def features() -> str:
    """The machine's kind and, on Linux, the line of /proc/cpuinfo with the processor's instruction sets."""
    text = platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        text += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return text


def has_avx512() -> bool:
    """Whether its registers hold 16 floats; else 8, where it is an x86-64."""
    return "avx512f" in features().split()
