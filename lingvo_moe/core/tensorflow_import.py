"""How a command imports TensorFlow: silently, and in half the time."""

import contextlib
import gc
import os
from collections.abc import Iterator

from lingvo_moe.core.collection import paused_collection
from lingvo_moe.core.quiet import quiet

_KERAS = "TF_USE_LEGACY_KERAS"


@contextlib.contextmanager
def importing_tensorflow() -> Iterator[None]:
    """Imports TensorFlow silently and without Keras; inside, what needs TensorFlow can be imported silently.

    TensorFlow imports Keras at once, and Keras imports what it can draw and fit with, in two seconds. With the variable
    of an older Keras, which is not installed, that import is left out. Afterwards `tf.keras` is there as usual, and is
    imported when it is used, as TensorFlow Text does. If an import fails, what it wrote is shown.
    """
    with quiet(), paused_collection():
        with _without_keras():
            import tensorflow

            del tensorflow
        yield
    # Modules stay: the collector need not visit them again.
    gc.freeze()


@contextlib.contextmanager
def _without_keras() -> Iterator[None]:
    before = os.environ.get(_KERAS)
    os.environ.setdefault(_KERAS, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_KERAS]
