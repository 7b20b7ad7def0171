"""Figures of how evenly experts are used."""

import numpy as np

from lingvo_moe.core.moe.expert_loads import ExpertLoads


def test_figures_of_a_few_choices():
    """Two layers of four experts, two a token: one uses two experts alone, the other all alike."""
    loads = ExpertLoads(4)
    assert loads.Figures() == {}
    loads.Add(np.array([[[0, 1], [0, 1]], [[0, 1], [2, 3]]]))
    loads.Add(np.array([[[0, 1]], [[3, 0]]]))
    loads.Add(np.array([[[1, 0]], [[2, 1]]]))
    figures = {name: list(values) for name, values in loads.Figures().items()}
    assert figures == {
        "expert_load_max_over_mean": [2, 1],
        "expert_load_entropy": [0.5, 1],
        "dead_experts": [0.5, 0],
    }
