"""Plans the cheapest steps from one sharding of a tensor to another.

In a redistribution devices slice, exchange or gather parts. The kinds of steps and their order decide
how many bytes move. The plan is a shortest path in a graph of shardings. Imports neither TensorFlow nor
JAX.
"""

import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lingvo_moe.core.sharding.letters import DimsMapping, axes_of, check_mapping
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError

# Up to so many shardings the search splits mesh axes into prime factors; beyond, it uses whole axes.
_FEW_STATES = 5_000
# How many orders of an axis's factors are tried to find the common factors of two meshes.
_MOST_ORDERS = 256

SLICE, ALL_TO_ALL, ALL_GATHER, PERMUTE = "slice", "all-to-all", "all-gather", "collective-permute"

# A sharding: a mesh, also as text, and the mesh axes of each dimension.
Layout = tuple[Mesh | str, DimsMapping]
# The same with a tuple of axes for each dimension.
_Ends = tuple[Mesh, tuple[tuple[str, ...], ...]]
# For each dimension the atoms (prime factors of axes) that shard it, major first.
_State = tuple[tuple[int, ...], ...]
_Node = tuple[int, _State]  # a grid's number and a state of it
# Kind, bytes, ways and dims of a step; None if both nodes are the same sharding.
_Edge = tuple[str, int, int, tuple[int, ...]] | None


@dataclass(frozen=True)
class Move:
    """One step of a plan, for which the partitioner needs at most one collective."""

    # 'slice' (devices keep a slice of their part: free), 'all-to-all' (a split moves from one dimension to another),
    # 'all-gather' (a split ends) or 'collective-permute' (the same parts go to other devices).
    kind: str
    tiles: tuple[int, ...]  # the number of parts of each dimension afterwards
    # Device numbers in the order of the parts; the holders of one part are adjacent.
    devices: tuple[int, ...]
    # Bytes that a device receives; for a permutation, a device that does not keep its part.
    num_bytes: int = 0
    ways: int = 1  # how many devices exchange with each other; 1 for a slice
    # The dimension that is sliced, gathered or permuted; (from, to) of an all-to-all.
    dims: tuple[int, ...] = ()

    def assignment(self) -> np.ndarray:
        """The devices in the shape of the tiles, and a last dimension for the copies of a part."""
        return np.array(self.devices).reshape((*self.tiles, -1))

    def __str__(self) -> str:
        parts = "x".join(str(n) for n in self.tiles)
        if self.kind == SLICE:
            return f"slice to {parts} parts"
        how = {
            ALL_TO_ALL: lambda: (
                f" from dimension {self.dims[0]} to {self.dims[1]}, {self.ways} ways"
            ),
            ALL_GATHER: lambda: f" of dimension {self.dims[0]}, {self.ways} ways",
            PERMUTE: lambda: "",
        }[self.kind]()
        return f"{self.kind}{how}, to {parts} parts: {self.num_bytes} bytes"


def plan_redistribution(
    shape: Sequence[int], itemsize: int, source: Layout, target: Layout
) -> tuple[Move, ...]:
    """Returns the steps from `source` to `target` with the fewest bytes received by a device.

    Among equal plans it chooses the one with the fewest collectives. Intermediate shardings can be any
    mapping of the two meshes; if there are few shardings, axes are split into prime factors, so that a
    part of an axis can move. A split ends or moves only at the minor end of its dimension's axes:
    elsewhere parts are not in order, and have to be permuted first. If parts are uneven, padding
    counts, and only steps that keep the borders of the parts are used; gathering the full dimension
    always keeps them.

    Args:
        shape: the global shape.
        itemsize: bytes of an element.
        source, target: (mesh, mapping), as `mesh_split` takes them; the meshes may arrange the same
            devices differently.

    Raises:
        ShardingError: meshes of different sizes, or a mapping that does not fit the shape or its
            mesh; the message says which of the two.
    """
    shape = tuple(int(n) for n in shape)
    layouts = []
    for name, (mesh, mapping) in (("source", source), ("target", target)):
        mesh = Mesh.parse(mesh, f"redistribution's {name} mesh")
        check_mapping(f"redistribution's {name} {mapping}", shape, mapping, mesh)
        layouts.append((mesh, tuple(axes_of(a) for a in mapping)))
    (before, _), (after, _) = layouts
    if before.size != after.size:
        raise ShardingError(
            f"redistribution from mesh {before} to mesh {after}: they have {before.size} and {after.size} devices, and "
            "only the same devices can exchange parts"
        )
    return _plan(shape, int(itemsize), *layouts)


def total_bytes(plan: Sequence[Move]) -> int:
    """Bytes that a device receives in all steps together."""
    return sum(step.num_bytes for step in plan)


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    itemsize: int,
    source: _Ends,
    target: _Ends,
) -> tuple[Move, ...]:
    if not shape:
        return ()
    return _Search(shape, itemsize, source, target).Run()


@dataclass(frozen=True)
class _AtomGrid:
    """A mesh whose axes are split into atoms; a split of a dimension is a sequence of atoms."""

    sizes: tuple[int, ...]  # the sizes of the atoms
    digits: np.ndarray  # [atoms, devices]: each device's coordinate along each atom
    # The atoms of each named axis, major first, for each mesh that the grid represents.
    axes: tuple[dict[str, tuple[int, ...]], ...]

    def Parts(self, atoms: tuple[int, ...]) -> np.ndarray:
        """The number of the part that each device holds."""
        part = np.zeros(self.digits.shape[1], np.int64)
        for atom in atoms:
            part = part * self.sizes[atom] + self.digits[atom]
        return part

    def Ways(self, atoms: tuple[int, ...]) -> int:
        return math.prod(self.sizes[a] for a in atoms)

    def States(self, shape: tuple[int, ...]) -> Iterator[_State]:
        """All shardings of a tensor whose dimensions have no more parts than elements."""
        atoms = range(len(self.sizes))
        for count in range(len(self.sizes) + 1):
            for order in itertools.permutations(atoms, count):
                for borders in itertools.combinations_with_replacement(
                    range(count + 1), len(shape) - 1
                ):
                    ends = (0, *borders, count)
                    state = tuple(order[a:b] for a, b in itertools.pairwise(ends))
                    if all(self.Ways(s) <= max(n, 1) for s, n in zip(state, shape)):
                        yield state


class _Search:
    """Dijkstra's algorithm over shardings of one tensor."""

    def __init__(self, shape: tuple[int, ...], itemsize: int, source: _Ends, target: _Ends) -> None:
        self._shape, self._itemsize = shape, itemsize
        self._holdings: dict[_Node, np.ndarray] = {}
        self._grids = _grids(source[0], target[0], len(shape))
        self._source: _Node = (0, tuple(_atoms(self._grids[0].axes[0], a) for a in source[1]))
        axes = self._grids[-1].axes[-1]
        self._target: _Node = (len(self._grids) - 1, tuple(_atoms(axes, a) for a in target[1]))
        self._same_tiles: dict[tuple[int, ...], list[_Node]] = defaultdict(list)
        for number, grid in enumerate(self._grids):
            for state in grid.States(shape):
                self._same_tiles[self._Tiles((number, state))].append((number, state))

    def Run(self) -> tuple[Move, ...]:
        # The cost of a path: bytes, collectives, annotations. The counter makes ties deterministic.
        best: dict[_Node, tuple[int, int, int]] = {self._source: (0, 0, 0)}
        came: dict[_Node, tuple[_Node, _Edge]] = {}
        counter = itertools.count()
        queue = [((0, 0, 0), next(counter), self._source)]
        while queue:
            cost, _, node = heapq.heappop(queue)
            if cost > best[node]:
                continue
            if node == self._target:
                break
            for other, edge in self._Edges(node):
                new = cost
                if edge is not None:
                    new = (cost[0] + edge[1], cost[1] + (edge[0] != SLICE), cost[2] + 1)
                if other not in best or new < best[other]:
                    best[other] = new
                    came[other] = (node, edge)
                    heapq.heappush(queue, (new, next(counter), other))
        steps: list[Move] = []
        node = self._target
        while node != self._source:
            before, edge = came[node]
            if edge is not None:
                steps.append(self._Move(node, *edge))
            node = before
        return _merge_slices(steps[::-1])

    def _Edges(self, node: _Node) -> Iterator[tuple[_Node, _Edge]]:
        number, state = node
        grid = self._grids[number]
        free = [a for a in range(len(grid.sizes)) if not any(a in atoms for atoms in state)]
        for dim, atoms in enumerate(state):
            for more in self._Cuts(grid, dim, atoms, free):
                yield _changed(node, {dim: atoms + more}), (SLICE, 0, 1, (dim,))
            for num_left in range(len(atoms)):
                left, moved = atoms[:num_left], atoms[num_left:]
                if not self._Aligned(grid, dim, left, atoms):
                    continue
                ways = grid.Ways(moved)
                received = (ways - 1) * self._Bytes(node)
                yield _changed(node, {dim: left}), (ALL_GATHER, received, ways, (dim,))
                yield from self._AllToAlls(node, dim, left, moved)
        here = self._Holdings(node)
        for other in self._same_tiles[self._Tiles(node)]:
            same = np.array_equal(self._Holdings(other), here)
            yield other, None if same else (PERMUTE, self._Bytes(node), 1, ())

    def _AllToAlls(
        self, node: _Node, dim: int, left: tuple[int, ...], moved: tuple[int, ...]
    ) -> Iterator[tuple[_Node, _Edge]]:
        number, state = node
        grid, ways = self._grids[number], self._grids[number].Ways(moved)
        for to, atoms in enumerate(state):
            if to == dim or not self._Aligned(grid, to, atoms, atoms + moved):
                continue
            sizes = self._PartShape(node)
            sizes[to] = -(-self._shape[to] // grid.Ways(atoms + moved))
            received = (ways - 1) * math.prod(sizes) * self._itemsize
            changes = {dim: left, to: atoms + moved}
            yield _changed(node, changes), (ALL_TO_ALL, received, ways, (dim, to))

    def _Cuts(
        self, grid: _AtomGrid, dim: int, atoms: tuple[int, ...], free: list[int]
    ) -> Iterator[tuple[int, ...]]:
        # Any sharding of a replicated dimension is free, also one whose borders a coarser one would not share.
        longest = len(free) if not atoms and self._shape[dim] % math.prod(grid.sizes) else 1
        for count in range(1, longest + 1):
            for more in itertools.permutations(free, count):
                if self._Aligned(grid, dim, atoms, atoms + more):
                    yield more

    def _Aligned(
        self, grid: _AtomGrid, dim: int, coarse: tuple[int, ...], fine: tuple[int, ...]
    ) -> bool:
        """Whether the parts of `fine` lie inside those of `coarse`, of which there is one a device."""
        size, few, many = self._shape[dim], grid.Ways(coarse), grid.Ways(fine)
        if many > max(size, 1):
            return False
        return not coarse or -(-size // few) == (many // few) * -(-size // many)

    def _Move(
        self, node: _Node, kind: str, received: int, ways: int, dims: tuple[int, ...]
    ) -> Move:
        holders = np.argsort(self._Holdings(node), kind="stable")
        return Move(kind, self._Tiles(node), tuple(holders.tolist()), received, ways, dims)

    def _Tiles(self, node: _Node) -> tuple[int, ...]:
        return tuple(self._grids[node[0]].Ways(atoms) for atoms in node[1])

    def _Holdings(self, node: _Node) -> np.ndarray:
        """The number of each device's part, row-major."""
        if node not in self._holdings:
            atoms = tuple(itertools.chain.from_iterable(node[1]))
            self._holdings[node] = self._grids[node[0]].Parts(atoms)
        return self._holdings[node]

    def _PartShape(self, node: _Node) -> list[int]:
        return [-(-n // parts) for n, parts in zip(self._shape, self._Tiles(node))]

    def _Bytes(self, node: _Node) -> int:
        return math.prod(self._PartShape(node)) * self._itemsize


def _changed(node: _Node, changes: dict[int, tuple[int, ...]]) -> _Node:
    return node[0], tuple(changes.get(d, atoms) for d, atoms in enumerate(node[1]))


def _merge_slices(steps: list[Move]) -> tuple[Move, ...]:
    """Cuts that follow each other are one."""
    return tuple(
        step
        for step, following in itertools.zip_longest(steps, steps[1:])
        if not (step.kind == SLICE and following is not None and following.kind == SLICE)
    )


def _atoms(axes: dict[str, tuple[int, ...]], names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(axes[name] for name in names))


@functools.lru_cache(maxsize=64)
def _grids(source: Mesh, target: Mesh, rank: int) -> tuple[_AtomGrid, ...]:
    """One grid for both meshes if their axes have the same factors, else one for each."""
    primes = [_factorings(mesh) for mesh in (source, target)]
    for pair in itertools.product(*primes):
        if _atom_set(pair[0]) == _atom_set(pair[1]):
            pairs = [pair]
            break
    else:
        pairs = [(factorings[0],) for factorings in primes]
    fine = tuple(_grid(*pair) for pair in pairs)
    if sum(_count_states(len(grid.sizes), rank) for grid in fine) <= _FEW_STATES:
        return fine
    return tuple(_grid(*_merge_neighbours(*pair)) for pair in pairs)


# A factored mesh: for each axis its atoms, major first; an atom is its size and the devices' digits.
_Factoring = dict[str, list[tuple[int, bytes]]]


def _factorings(mesh: Mesh) -> list[_Factoring]:
    """The mesh in prime atoms, once for each order of the factors of its axes."""
    places = np.empty((len(mesh.shape), mesh.size), np.int64)
    places[:, mesh.device_array().flatten()] = np.indices(mesh.shape).reshape(len(mesh.shape), -1)
    choices = []
    for axis, size in enumerate(mesh.shape):
        options = []
        for order in _prime_factors(size):
            rest, atoms = places[axis], []
            for n in reversed(order):
                atoms.append((n, (rest % n).tobytes()))
                rest = rest // n
            options.append(atoms[::-1])
        choices.append(options)
    combined = itertools.islice(itertools.product(*choices), _MOST_ORDERS)
    return [dict(zip(mesh.axis_names, choice)) for choice in combined]


def _prime_factors(size: int) -> list[tuple[int, ...]]:
    """All orders of the prime factors of a number, the ascending one first."""
    factors, n = [], 2
    while size > 1:
        while size % n == 0:
            factors.append(n)
            size //= n
        n += 1
    if len(set(factors)) <= 1:
        return [tuple(factors)]
    return list(dict.fromkeys(itertools.islice(itertools.permutations(factors), 5040)))


def _atom_set(factoring: _Factoring) -> set[tuple[int, bytes]]:
    return {atom for axis in factoring.values() for atom in axis}


def _merge_neighbours(*factorings: _Factoring) -> list[_Factoring]:
    """Merges atoms that are adjacent in every factoring, which mostly restores the mesh's axes."""
    followers = [
        {a: b for axis in f.values() for a, b in itertools.pairwise(axis)} for f in factorings
    ]
    merged = []
    for factoring in factorings:
        axes: _Factoring = {}
        for name, axis in factoring.items():
            axes[name] = []
            last = None
            for atom in axis:
                if last is not None and all(f.get(last) == atom for f in followers):
                    size, digits = axes[name].pop()
                    both = np.frombuffer(digits, np.int64) * atom[0]
                    both = both + np.frombuffer(atom[1], np.int64)
                    axes[name].append((size * atom[0], both.tobytes()))
                else:
                    axes[name].append(atom)
                last = atom
        merged.append(axes)
    return merged


def _grid(*factorings: _Factoring) -> _AtomGrid:
    atoms = [a for axis in factorings[0].values() for a in axis]
    numbers = {atom: i for i, atom in enumerate(atoms)}
    devices = len(np.frombuffer(atoms[0][1], np.int64)) if atoms else 1
    return _AtomGrid(
        sizes=tuple(size for size, _ in atoms),
        digits=np.array([np.frombuffer(d, np.int64) for _, d in atoms]).reshape(-1, devices),
        axes=tuple(
            {name: tuple(numbers[a] for a in axis) for name, axis in f.items()} for f in factorings
        ),
    )


def _count_states(atoms: int, rank: int) -> int:
    return sum(
        math.perm(atoms, used) * math.comb(used + max(rank, 1) - 1, used)
        for used in range(atoms + 1)
    )
