"""The best choice of every operator at once, as an integer program (HiGHS, through SciPy).

Each operator has one binary variable for each of its choices, of which one is 1. Each pair of operators that exchange
tensors has a variable for each pair of shardings; its sums over rows and columns are those of the operators' variables.
This is the formulation of Zheng et al. 2022, "Alpa", section 4.

Choices that cannot be in the best answer are left out first, by Goldstein's criterion: another choice is better by more
than all neighbours together can make up for. The answer is the same in every run: HiGHS has a fixed seed, and the order
of variables follows that of the operations.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from lingvo_moe.analysis.search.auto_shard.choice_costs import Choices, Edge

_SECONDS_LIMIT = 120.0
_MICRO = 1e6  # the objective is in microseconds: solvers have absolute tolerances
_INFEASIBLE = 2


class NoSolution(Exception):
    """No choices keep the limit of memory."""


@dataclass(frozen=True)
class Solution:
    """The choices."""

    chosen: tuple[int, ...]  # for each operator the number of its choice
    seconds: float  # the sum of all costs
    # `kept`, `working`: bytes on a device: what stays, and the most that one operator has at work beside.
    kept: float
    working: float
    optimal: bool  # False where the solver ran out of time


def solve(
    choices: Sequence[Choices], edges: Sequence[Edge], memory_limit: float | None
) -> Solution:
    """Minimises the seconds, with at most `memory_limit` bytes on a device; None: any.

    Raises NoSolution: nothing keeps the limit.
    """
    alive = _eliminated(choices, edges, memory_limit)
    chosen, optimal = _integer_program(choices, edges, alive, memory_limit)
    return replace(cost(choices, edges, chosen), optimal=optimal)


def cost(choices: Sequence[Choices], edges: Sequence[Edge], chosen: Sequence[int]) -> Solution:
    """Adds up the seconds and bytes of given choices."""
    seconds = sum(float(c.seconds[k]) for c, k in zip(choices, chosen))
    for edge in edges:
        (a, b), (rows, columns) = edge.ends, edge.classes
        seconds += float(edge.seconds[rows[chosen[a]], columns[chosen[b]]])
    stays = sum(float(c.kept[k]) for c, k in zip(choices, chosen))
    working = max((float(c.working[k]) for c, k in zip(choices, chosen)), default=0.0)
    return Solution(tuple(int(k) for k in chosen), seconds, stays, working, True)


def least_memory(choices: Sequence[Choices]) -> float:
    """Bytes on a device that every answer needs at least."""
    stays = [c.kept for c in choices]
    total = sum(float(k.min()) for k in stays)
    return max(
        (total + float((k - k.min() + c.working).min()) for k, c in zip(stays, choices)),
        default=0.0,
    )


def _eliminated(
    choices: Sequence[Choices], edges: Sequence[Edge], memory_limit: float | None
) -> list[np.ndarray]:
    """Returns the choices of each operator that may be in the best answer."""
    alive = [np.arange(len(c.choices)) for c in choices]
    tables: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for edge in edges:
        (a, b), (rows, columns) = edge.ends, edge.classes
        full = edge.seconds[np.ix_(rows, columns)]
        tables[a].append((b, full))
        tables[b].append((a, full.T))
    changed = set(range(len(choices)))
    while changed:
        n = min(changed)
        changed.discard(n)
        surviving = _survivors(n, choices[n], alive, tables[n], memory_limit is not None)
        if len(surviving) < len(alive[n]):
            alive[n] = surviving
            changed |= {other for other, _ in tables[n]} | {n}
    return alive


def _survivors(
    n: int,
    choices: Choices,
    alive: list[np.ndarray],
    tables: list[tuple[int, np.ndarray]],
    memory_matters: bool,
) -> np.ndarray:
    mine = alive[n]
    # worst[i, j]: how much better j is than i at least.
    gain = choices.seconds[mine][:, None] - choices.seconds[mine][None, :]
    for other, table in tables:
        part = table[np.ix_(mine, alive[other])]
        gain = gain + (part[:, None, :] - part[None, :, :]).min(axis=2)
    better = gain > 0
    # Of choices that are equal everywhere the first stays.
    order = np.arange(len(mine))
    better |= (gain == 0) & (gain.T == 0) & (order[:, None] > order[None, :])
    if memory_matters:
        for size in (choices.kept[mine], choices.working[mine]):
            better &= size[:, None] >= size[None, :]
    dropped: list[int] = []
    for i in order:
        if any(j not in dropped for j in np.flatnonzero(better[i])):
            dropped.append(int(i))
    return np.delete(mine, dropped)


class _Rows:
    """The constraints of an integer program, row by row."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def Add(self, entries: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self._entries += [(len(self.low), column, value) for column, value in entries]
        self.low.append(low)
        self.high.append(high)

    def Constraint(self, columns: int) -> LinearConstraint:
        rows, cols, values = zip(*self._entries)
        matrix = sparse.csr_matrix((values, (rows, cols)), shape=(len(self.low), columns))
        return LinearConstraint(matrix, self.low, self.high)


def _integer_program(
    choices: Sequence[Choices],
    edges: Sequence[Edge],
    alive: Sequence[np.ndarray],
    memory_limit: float | None,
) -> tuple[list[int], bool]:
    rows = _Rows()
    costs: list[float] = []
    first = []
    for c, left in zip(choices, alive, strict=True):
        first.append(len(costs))
        costs += list(c.seconds[left] * _MICRO)
        rows.Add([(first[-1] + i, 1.0) for i in range(len(left))], 1.0, 1.0)
    binary = len(costs)
    for edge in edges:
        _add_edge(edge, alive, first, costs, rows)
    if memory_limit is not None:
        _limit_memory(choices, alive, first, memory_limit, rows)
    integral = np.zeros(len(costs))
    integral[:binary] = 1
    result = milp(
        np.array(costs),
        integrality=integral,
        bounds=Bounds(0, 1),
        constraints=rows.Constraint(len(costs)),
        options={"time_limit": _SECONDS_LIMIT, "mip_rel_gap": 1e-6},
    )
    if result.x is None:
        if result.status == _INFEASIBLE:
            raise NoSolution
        raise RuntimeError(f"the solver found no answer: {result.message}")
    return [
        int(left[int(np.argmax(result.x[start : start + len(left)]))])
        for start, left in zip(first, alive)
    ], result.status == 0


def _add_edge(
    edge: Edge, alive: Sequence[np.ndarray], first: Sequence[int], costs: list[float], rows: _Rows
) -> None:
    ends = [
        (first[n], classes[alive[n]]) for n, classes in zip(edge.ends, edge.classes, strict=True)
    ]
    sides = [np.unique(classes) for _, classes in ends]
    part = edge.seconds[np.ix_(*sides)] * _MICRO
    if not part.any():
        return
    if 1 in part.shape:  # linear in the other end
        side = 0 if part.shape[1] == 1 else 1
        start, classes = ends[side]
        by_class = dict(zip(sides[side], part.flatten()))
        for i, c in enumerate(classes):
            costs[start + i] += by_class[c]
        return
    start = len(costs)
    costs += list(part.flatten())
    numbers = start + np.arange(part.size).reshape(part.shape)
    for side, (offset, classes) in enumerate(ends):
        for k, c in enumerate(sides[side]):
            mine = numbers[k] if side == 0 else numbers[:, k]
            entries = [(int(m), 1.0) for m in mine]
            entries += [(offset + int(i), -1.0) for i in np.flatnonzero(classes == c)]
            rows.Add(entries, 0.0, 0.0)


def _limit_memory(
    choices: Sequence[Choices],
    alive: Sequence[np.ndarray],
    first: Sequence[int],
    limit: float,
    rows: _Rows,
) -> None:
    """Requires that the kept tensors and the working memory of any one operator fit into the limit together."""
    stays = [
        (start + i, c.kept[k] / limit)
        for c, left, start in zip(choices, alive, first)
        for i, k in enumerate(left)
    ]
    peaks = []
    for n, (c, left) in enumerate(zip(choices, alive)):
        # Only an operator that may be the largest.
        if c.working[left].max() > 0:
            peaks.append((float(c.working[left].max()), n))
    largest = sorted(peaks, reverse=True)
    least = max((float(c.working[left].min()) for c, left in zip(choices, alive)), default=0.0)
    rows.Add([(j, v) for j, v in stays], -np.inf, 1.0 - least / limit)
    for most, n in largest:
        if most <= least:
            break
        extra = {first[n] + i: choices[n].working[k] / limit for i, k in enumerate(alive[n])}
        rows.Add([(j, v + extra.get(j, 0.0)) for j, v in stays], -np.inf, 1.0)
