"""Imports TensorFlow for a command: silently, and in half the time."""

import gc
import os
import sys

from lingvo_moe.core.console.collection import paused_collection
from lingvo_moe.core.console.quiet import quiet

_KERAS = "TF_USE_LEGACY_KERAS"


def import_tensorflow() -> None:
    """Imports TensorFlow silently, and without Keras; if the import fails, what it wrote is shown.

    TensorFlow imports Keras at once, and Keras imports what it can draw and fit with, in two seconds. With the
    variable of an older Keras, which is not installed, that is left out. Afterwards `tf.keras` is there as usual, and
    is imported when it is used.
    """
    if "tensorflow" in sys.modules:
        return
    before = os.environ.get(_KERAS)
    os.environ.setdefault(_KERAS, "1")
    try:
        with quiet(), paused_collection():
            import tensorflow as _  # noqa: F401
    finally:
        if before is None:
            del os.environ[_KERAS]
    # Modules stay: the collector need not visit them again.
    gc.freeze()
