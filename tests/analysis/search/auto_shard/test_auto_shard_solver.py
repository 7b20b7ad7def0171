"""solver.py: the best of all choices, within a limit of memory."""

import itertools

import numpy as np
import pytest

from lingvo_moe.analysis.search.auto_shard.choice_costs import Choices, Edge
from lingvo_moe.analysis.search.auto_shard.solver import NoSolution, cost, least_memory, solve

_SIZES = (3, 4, 2, 3, 1)
_PAIRS = ((0, 1), (1, 2), (0, 2), (2, 3), (3, 4))


def _problem(seed: int) -> tuple[list[Choices], list[Edge]]:
    rng = np.random.RandomState(seed)
    choices = [
        Choices(
            tuple((i,) for i in range(n)),
            rng.randint(0, 9, n) * 1e-6,
            rng.randint(1, 9, n) * 1e3,
            rng.randint(0, 5, n) * 1e3,
        )
        for n in _SIZES
    ]
    edges = []
    for a, b in _PAIRS:
        rows, columns = rng.randint(0, 2, _SIZES[a]), rng.randint(0, 3, _SIZES[b])
        edges.append(Edge((a, b), (rows, columns), rng.randint(0, 9, (2, 3)) * 1e-6))
    return choices, edges


def _all(choices: list[Choices], edges: list[Edge]) -> list:
    spaces = [range(len(c.choices)) for c in choices]
    return [cost(choices, edges, chosen) for chosen in itertools.product(*spaces)]


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_what_trying_all_finds_and_keeps_a_limit_of_memory(seed):
    choices, edges = _problem(seed)
    every = _all(choices, edges)
    found = solve(choices, edges, None)
    assert found.seconds == pytest.approx(min(s.seconds for s in every))
    assert solve(choices, edges, None) == found
    sizes = sorted(s.kept + s.working for s in every)
    assert least_memory(choices) <= sizes[0]
    limit = sizes[len(sizes) // 20]
    found = solve(choices, edges, limit)
    within = [s.seconds for s in every if s.kept + s.working <= limit]
    assert found.kept + found.working <= limit
    assert found.seconds == pytest.approx(min(within))
    with pytest.raises(NoSolution):
        solve(choices, edges, sizes[0] - 1)
