"""Figures of how evenly experts are used: in a training step, by language, where a model decodes.

Letters: L MoE layer, R row, k choice rank, E expert.
"""

from collections import deque

import numpy as np

_NOTED = 256  # steps that figures are of


class ExpertLoads:
    """The rows that each expert got in the last steps of decoding, as a server sums them up."""

    def __init__(self, num_experts: int):
        self._num_experts = num_experts
        self._counts: deque[np.ndarray] = deque(maxlen=_NOTED)

    def Add(self, choices_LRk: np.ndarray) -> None:
        """Adds the choices of a step."""
        layers, size = len(choices_LRk), self._num_experts
        at = choices_LRk.reshape(layers, -1) + size * np.arange(layers)[:, np.newaxis]
        counts = np.bincount(at.ravel(), minlength=layers * size)
        self._counts.append(counts.reshape(layers, size))

    def Figures(self) -> dict[str, np.ndarray]:
        """The figures of `load_figures` of each layer, [L]; none before the first step."""
        return load_figures(np.sum(list(self._counts), 0)) if self._counts else {}


def load_figures(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Figures of the rows of experts, [..., E], by the names that a training step's metrics have, [...] each.

    Returns:
        Those of `evenness` after `expert_load_`, and dead_experts: the share of experts without rows.
    """
    figures = {f"expert_load_{name}": x for name, x in evenness(rows).items()}
    return figures | {"dead_experts": (rows == 0).mean(-1)}


def evenness(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Figures of how evenly rows, or shares of them, [..., E] fall on experts, [...] each.

    Returns:
        max_over_mean: the largest number over the mean; entropy: of the shares, over log E: 1 where all experts have as
        many rows, 0 where one has all or none has any.
    """
    experts = rows.shape[-1]
    share = rows / np.maximum(rows.sum(-1, keepdims=True), 1e-9)
    logs = np.log(np.where(share > 0, share, 1))
    return {
        "max_over_mean": share.max(-1) * experts,
        "entropy": np.abs((share * logs).sum(-1)) / np.log(max(experts, 2)),
    }
