"""The share of tokens that each expert gets where a model decodes, as a server sums it up.

Letters: L MoE layer, R row, k choice rank, E expert.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

_NOTED = 256  # steps that figures are of


class ExpertLoads:
    """The rows that each expert got in the last steps."""

    def __init__(self, num_experts: int):
        self._num_experts = num_experts
        self._counts: deque[np.ndarray] = deque(maxlen=_NOTED)

    def Add(self, choices_LRk: np.ndarray) -> None:
        """Adds the choices of a step."""
        layers, size = len(choices_LRk), self._num_experts
        at = choices_LRk.reshape(layers, -1) + size * np.arange(layers)[:, np.newaxis]
        counts = np.bincount(at.ravel(), minlength=layers * size)
        self._counts.append(counts.reshape(layers, size))

    def Figures(self) -> Mapping[str, np.ndarray]:
        """Figures of each layer, [L]; none before the first step.

        Returns:
            largest_over_mean: rows of the expert that has most, over the mean; dead_share: the share of experts without
            rows; entropy: of the shares of rows, over log E: 1 where all experts have as many.
        """
        if not self._counts:
            return {}
        rows_LE = np.sum(list(self._counts), 0)
        share_LE = rows_LE / rows_LE.sum(1, keepdims=True)
        logs_LE = np.log(np.where(rows_LE > 0, share_LE, 1))
        return {
            "largest_over_mean": rows_LE.max(1) / rows_LE.mean(1),
            "dead_share": (rows_LE == 0).mean(1),
            "entropy": np.abs((share_LE * logs_LE).sum(1)) / np.log(max(self._num_experts, 2)),
        }
