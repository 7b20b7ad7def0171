"""Marks tests that need XLA's GPU compiler, which is an optional requirement."""

from importlib import metadata

import pytest

from lingvo_moe.core.engine.cuda_plugin import PACKAGE


def _is_installed() -> bool:
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


needs_gpu_compiler = pytest.mark.skipif(
    not _is_installed(),
    reason="needs the GPU compiler: pip install --no-deps -r requirements-gpu.txt",
)
