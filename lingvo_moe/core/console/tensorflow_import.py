"""Imports TensorFlow for a command: silently, and in half the time."""

import gc
import os
import sys

from lingvo_moe.core.console.collection import paused_collection
from lingvo_moe.core.console.quiet import quiet

_KERAS = "TF_USE_LEGACY_KERAS"
_FAST_GRAPHS = "TF_FLAG_GRAPH_BUILDING_OPTIMIZATION"  # read with the first operation of a graph
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_POOL, _POOL_LIMIT = "TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB"


def import_tensorflow(pool: bool = False) -> None:
    """Imports TensorFlow silently, and without Keras; if the import fails, what it wrote is shown.

    TensorFlow imports Keras at once, and Keras imports what it can draw and fit with, in two seconds. With the
    variable of an older Keras, which is not installed, that is left out. Afterwards `tf.keras` is there as usual, and
    is imported when it is used.

    Unless the environment says otherwise, TensorFlow prepares an operation of a graph in C++ where it can, not in
    Python: the same graph and the same errors, in a tenth less time for the trace of a layer and its gradients.

    Likewise it runs products with oneDNN on every processor. By itself it does so only where a processor has
    instructions for products of 8 bits (AVX-512 VNNI); elsewhere batched products, as those with packed weights, are
    Eigen's, which took twice the time of many rows and a third more of four.

    With `pool`, TensorFlow keeps the memory of tensors on the CPU for other tensors, unless the environment says
    otherwise (TF_CPU_ALLOCATOR_USE_BFC=0). Without, each large tensor has fresh pages, which the system must clear: a
    fifth of a step of mt.M4Small with 24 experts by TensorFlow's own kernels.
    """
    if "tensorflow" in sys.modules:
        return
    if pool:
        os.environ.setdefault(_POOL, "1")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.environ.setdefault(_POOL_LIMIT, str(memory >> 20))
    os.environ.setdefault(_FAST_GRAPHS, "1")
    os.environ.setdefault(_ONEDNN, "1")
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
