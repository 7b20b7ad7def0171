"""The kernels for TPUs from v4 on: XLA's, but for those that JAX has for them, in pallas/.

Self-attention in rows has one as well, which layers/attention.py asks for.
"""

from lingvo_moe.core.kernels.pallas import grouped_matmul as _grouped
from lingvo_moe.core.kernels.xla import *  # noqa: F403

grouped_matmul = _grouped.grouped_matmul
