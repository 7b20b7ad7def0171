"""The kernels for TPUs from v4 on: XLA's, but for those that JAX has for them, in pallas/."""

from lingvo_moe.core.kernels.pallas import attention as _attention, grouped_matmul as _grouped
from lingvo_moe.core.kernels.xla import *  # noqa: F403

attend = _attention.attend
grouped_matmul = _grouped.grouped_matmul
