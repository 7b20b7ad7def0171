"""Python's garbage collector, paused where much is made and little is thrown away."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Runs its body without garbage collection.

    Importing TensorFlow, or tracing a function of ten thousand operations, makes hundreds of thousands of objects
    that stay. The collector visits all of them many times over and frees next to nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
