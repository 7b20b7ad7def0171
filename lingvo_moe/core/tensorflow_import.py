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
    """Inside, TensorFlow and what needs it can be imported silently, and without Keras.

    TensorFlow imports Keras at once, and Keras imports what it can draw and fit with, in two seconds; nothing here
    uses it. With the variable of an older Keras, which is not installed, that import is left out. Afterwards
    `tf.keras` is there as usual, and is imported when it is used. If an import fails, what it wrote is shown.
    """
    before = os.environ.get(_KERAS)
    os.environ.setdefault(_KERAS, "1")
    try:
        with quiet(), paused_collection():
            yield
    finally:
        if before is None:
            del os.environ[_KERAS]
    # Modules stay: the collector need not visit them again.
    gc.freeze()
