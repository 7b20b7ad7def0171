"""Tables of experts by token id, from the choices of a trained model: the `hash` router's table 'file'.

Letters: B row, T token in row, L MoE layer, V vocabulary, E expert.
"""

from collections.abc import Mapping

import numpy as np

from lingvo_moe.core.nested_map import NestedMap


class ExpertTables:
    """The first choices of each stack's MoE layers, counted by token id."""

    def __init__(self, sides: Mapping[str, str], vocab_sizes: Mapping[str, int]):
        """`sides` has the side of a batch that each stack routes, `vocab_sizes` V of each stack."""
        self._sides, self._sizes = sides, vocab_sizes
        self._counts_LVE: dict[str, np.ndarray] = {}

    def Add(self, batch: NestedMap, moe: NestedMap) -> None:
        """Adds a batch, with metrics of the MoE layers made within `noting_choices`."""
        for stack, side in self._sides.items():
            row, metrics = batch[side], moe[stack]
            layers, experts = metrics.expert_load.shape
            first_LBT = np.asarray(metrics.choices)[..., 0].reshape(layers, *row.ids.shape)
            real_BT = np.asarray(row.segment_ids) > 0
            sizes = layers, self._sizes[stack], experts
            counts_LVE = self._counts_LVE.setdefault(stack, np.zeros(sizes, np.int64))
            for counts_VE, first_BT in zip(counts_LVE, first_LBT.astype(int), strict=True):
                np.add.at(counts_VE, (np.asarray(row.ids)[real_BT], first_BT[real_BT]), 1)

    def Tables(self) -> dict[str, np.ndarray]:
        """int32 [L,V] of each stack: numbers, see `balanced`."""
        return {
            stack: np.stack([balanced(counts_VE) for counts_VE in counts_LVE])
            for stack, counts_LVE in self._counts_LVE.items()
        }


def balanced(counts_VE: np.ndarray) -> np.ndarray:
    """int32 [V], a number for each id, whose rest by E is its expert; ids of an expert have different numbers.

    The most frequent ids choose first, each the expert that it was sent to most often among those that have less than
    an equal share of all tokens, so that none has more than that and one id. Of equal experts it takes that with the
    fewest ids: so ids that do not occur are dealt out.
    """
    experts = counts_VE.shape[1]
    tokens_V = counts_VE.sum(1)
    share = tokens_V.sum() / experts
    load_E, ids_E = np.zeros(experts), np.zeros(experts, int)
    numbers_V = np.zeros(len(counts_VE), np.int32)
    for v in np.argsort(-tokens_V, kind="stable"):
        full_E = load_E >= share if tokens_V[v] else np.zeros(experts, bool)
        expert = np.lexsort((ids_E, -counts_VE[v], full_E))[0]
        numbers_V[v] = expert + experts * ids_E[expert]
        load_E[expert] += tokens_V[v]
        ids_E[expert] += 1
    return numbers_V
