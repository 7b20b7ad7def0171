"""The share of tokens that each expert gets where a model decodes: noted while it is traced, summed up by a server.

Letters: L MoE layer, G group, S token in group, R row, k choice rank, E expert.
"""

import contextlib
import contextvars
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

_choices: contextvars.ContextVar[list[tf.Tensor] | None] = contextvars.ContextVar(
    "choices", default=None
)
_NOTED = 256  # steps that figures are of


@contextlib.contextmanager
def noting_choices() -> Iterator[list[tf.Tensor]]:
    """Inside, the list takes what `note` is given, in the order of the layers."""
    choices: list[tf.Tensor] = []
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


def note(expert_index: tf.Tensor) -> None:
    """Notes the experts of a layer's tokens, int32 [G,S,k], where somebody asks for them."""
    choices = _choices.get()
    if choices is not None:
        choices.append(expert_index)


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
