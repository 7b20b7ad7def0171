"""Random annotated expressions: einsums, and short chains of them.

An expression is data whose repr is Python, so that one that fails can be pasted into a test. Several
independent ones make a Group, which is compiled as one program: that is what a few hundred cost.

Letters of equations are arbitrary.
"""

import math
import random
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core import sharding
from lingvo_moe.core.sharding import Mesh

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    def __call__(self, t: tf.Tensor) -> tf.Tensor:
        return sharding.replicate(t)


@dataclass(frozen=True)
class Split:
    dim: int
    parts: int

    def __call__(self, t: tf.Tensor) -> tf.Tensor:
        return sharding.split(t, self.dim, self.parts)


@dataclass(frozen=True)
class MeshSplit:
    mesh: str
    device_ids: tuple[int, ...]
    mapping: tuple[Any, ...]

    def __call__(self, t: tf.Tensor) -> tf.Tensor:
        mesh = Mesh.parse(self.mesh)
        mesh = Mesh(mesh.axis_names, mesh.shape, self.device_ids)
        return sharding.mesh_split(t, mesh, self.mapping)


@dataclass(frozen=True)
class Shard:
    parts: Shape
    devices: tuple[int, ...]

    def __call__(self, t: tf.Tensor) -> tf.Tensor:
        return sharding.shard(t, np.array(self.devices).reshape(self.parts))


Cut = Replicate | Split | MeshSplit | Shard | None


@dataclass(frozen=True)
class Operand:
    """A float32 argument; `arrives` is the dimension that is sharded over all devices already, or None."""

    shape: Shape
    cut: Cut = None
    arrives: int | None = None


@dataclass(frozen=True)
class Einsum:
    """An einsum of the value so far (if there is one) and further operands, scaled by the number of terms."""

    equation: str
    terms: int = 1

    @property
    def further(self) -> int:
        """The number of operands besides the first."""
        return self.equation.count(",")

    def __call__(self, *operands: tf.Tensor) -> tf.Tensor:
        y = tf.einsum(self.equation, *operands)
        return y if self.terms == 1 else y * (1 / math.sqrt(self.terms))


@dataclass(frozen=True)
class Shift:
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return x + 1.0


@dataclass(frozen=True)
class Step:
    op: Einsum | Shift
    cut: Cut = None


@dataclass(frozen=True)
class Expression:
    """The first step is an einsum of the first operands; each later one continues with its result."""

    operands: tuple[Operand, ...]
    steps: tuple[Step, ...]

    def __call__(self, *values: tf.Tensor, annotated: bool = True) -> tf.Tensor:
        rest = [
            o.cut(v) if o.cut and annotated else v
            for o, v in zip(self.operands, values, strict=True)
        ]
        y = None
        for step in self.steps:
            taken = [] if y is None else [y]
            if isinstance(step.op, Einsum):
                count = step.op.further + 1 - len(taken)
                taken, rest = taken + rest[:count], rest[count:]
            y = step.op(*taken)
            if step.cut and annotated:
                y = step.cut(y)
        return y


@dataclass(frozen=True)
class Group:
    """Independent expressions over the same number of devices, for one program."""

    devices: int
    expressions: tuple[Expression, ...]
    mesh: Mesh = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", Mesh(("d",), (self.devices,)))

    def Args(self) -> list[np.ndarray]:
        """Returns normal float32 numbers for all operands, the same in every call."""
        rng = np.random.RandomState(self.devices)
        return [
            rng.standard_normal(o.shape).astype(np.float32)
            for e in self.expressions
            for o in e.operands
        ]

    def Splits(self) -> list[tuple | None]:
        return [
            None
            if o.arrives is None
            else tuple("d" if d == o.arrives else None for d in range(len(o.shape)))
            for e in self.expressions
            for o in e.operands
        ]

    def __call__(self, *values: tf.Tensor, annotated: bool = True) -> list[tf.Tensor]:
        """The value of each expression and its gradients by all operands, one after the other."""
        out, rest = [], list(values)
        for e in self.expressions:
            args, rest = rest[: len(e.operands)], rest[len(e.operands) :]
            with tf.GradientTape() as tape:
                tape.watch(args)
                y = e(*args, annotated=annotated)
                # A cotangent with different elements that is no constant, so that XLA cannot fold it.
                loss = tf.reduce_sum(tf.sin(y + 1.0))
            grads = tape.gradient(loss, args, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            out += [y, *grads]
        return out

    def Parts(self, results: Sequence[Any]) -> Iterator[tuple[Expression, Any, Sequence[Any]]]:
        """Yields (expression, value, gradients), from results in the order of __call__."""
        rest = list(results)
        for e in self.expressions:
            count = 1 + len(e.operands)
            yield e, rest[0], rest[1:count]
            rest = rest[count:]


def _with(items: tuple, index: int, item: Any) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


# Drawing. Kept small: a program's cost is compiling it, whatever the sizes.
_LETTERS = string.ascii_lowercase[:6]
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 12, 16)
_MOST_ELEMENTS = 16384  # of the index space of an einsum
_MOST_RANK = 5
_ELLIPSIS = "..."


def random_group(seed: int, count: int) -> Group:
    """`count` expressions over 1 to 8 devices; more often over 8, and 2 and 4, which divide best."""
    rng = random.Random(seed)
    devices = rng.choice((1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8))
    return Group(devices, tuple(expression(rng, devices) for _ in range(count)))


def expression(rng: random.Random, devices: int) -> Expression:
    """An einsum of one to three operands, then up to two more; sharded in one of three manners.

    'rows': tensors are sharded along one dimension each, any tensor along any, or not at all. 'grid': one
    tensor is sharded along several. 'letters': one einsum, whose letters have mesh axes of their own, and
    every tensor is sharded by its letters.

    What is left out is an einsum that has two tensors sharded along several dimensions each, not alike, and
    a grid whose rows have their devices in different orders: XLA partitions some of those wrongly. See
    the strict xfails of test_fuzz.py, which say when.
    """
    manner = rng.choice(("rows", "rows", "grid", "letters"))
    equation, shapes, shape, terms = _draw_einsum(rng, rng.randint(1, 3), None)
    ops: list[tuple[Any, Shape]] = [(Einsum(equation, terms), shape)]
    while manner != "letters" and shape and len(ops) < 3 and rng.random() < 0.5:
        later, more, shape, terms = _draw_einsum(rng, rng.randint(1, 2), shape)
        ops.append((Einsum(later, terms), shape))
        shapes += more
    tensors = shapes + [s for _, s in ops]
    if manner == "rows":
        cuts = [_draw_cut(rng, s, devices) for s in tensors]
    elif manner == "grid":
        cuts = [rng.choice([None, Replicate()]) for _ in tensors]
        chosen = rng.randrange(len(tensors))
        cuts[chosen] = _draw_grid(rng, tensors[chosen], devices)
    else:
        cuts = _draw_letters(rng, equation, tensors, devices)
    operands = tuple(
        Operand(s, cut, _draw_arrival(rng, s, devices)) for s, cut in zip(shapes, cuts)
    )
    return Expression(operands, tuple(Step(op, c) for (op, _), c in zip(ops, cuts[len(shapes) :])))


def _draw_arrival(rng: random.Random, shape: Shape, devices: int) -> int | None:
    even = [d for d, n in enumerate(shape) if devices > 1 and n % devices == 0]
    return rng.choice([None, *even])


def _draw_einsum(
    rng: random.Random, count: int, first: Shape | None
) -> tuple[str, list[Shape], Shape, int]:
    """(equation, operands' shapes, result's shape, number of terms) of an einsum of `count` operands.

    `first` is the shape of the value so far, which is then operand 0.
    """
    sizes: dict[str, int] = {}
    terms: list[str] = []
    for number in range(count):
        rank = len(first) if first and number == 0 else rng.randint(1, 4)
        term = _shuffled(rng, _LETTERS)[:rank]
        if first and number == 0:
            sizes |= dict(zip(term, first, strict=True))
        elif rank > 1 and rng.randint(0, 15) == 15:
            term[-1] = term[0]  # a diagonal
        terms.append("".join(term))
    for letter in _shuffled(rng, sorted({c for term in terms for c in term} - set(sizes))):
        room = _MOST_ELEMENTS // math.prod(sizes.values())
        sizes[letter] = rng.choice([n for n in _SIZES if n <= max(room, 1)])
    result = [c for c in _shuffled(rng, sorted(sizes)) if rng.random() < 0.5][:_MOST_RANK]
    dots: Shape = ()
    if not first and rng.randint(0, 5) == 5:
        room = _MOST_ELEMENTS // math.prod(sizes.values())
        dots = (rng.choice([n for n in _SIZES if n <= max(room, 1)]),)
        dotted = [rng.random() < 0.5 or i == 0 for i in range(count)]
        terms = [_ELLIPSIS * has + term for has, term in zip(dotted, terms)]
    shapes = [dots * t.startswith(_ELLIPSIS) + tuple(sizes[c] for c in t.strip(".")) for t in terms]
    shape = dots + tuple(sizes[c] for c in result)
    equation = ",".join(terms) + "->" + _ELLIPSIS * bool(dots) + "".join(result)
    added = math.prod(n for c, n in sizes.items() if c not in result)
    return equation, shapes[1:] if first else shapes, shape, added


def _draw_cut(rng: random.Random, shape: Shape, devices: int) -> Cut:
    """Draws None, replicate, or any way to shard one dimension over devices in any order."""
    kind = rng.choice(("none", "split", "mesh", "shard", "replicate"))
    if kind == "none":
        return None
    fits = [(d, n) for d, size in enumerate(shape) for n in _divisors(devices) if n <= size]
    if kind == "replicate" or not fits:
        return Replicate()
    dim, parts = rng.choice(fits)
    if kind == "split":
        return Split(dim, parts)
    if kind == "shard":
        whole = [(d, n) for d, n in fits if n == devices]
        if not whole:
            return None
        dim, parts = rng.choice(whole)
        return Shard(_with((1,) * len(shape), dim, parts), _draw_order(rng, devices))
    axes = rng.choice(_factorisations(devices))
    mesh, names = _mesh(axes)
    taken = _shuffled(rng, names)[: rng.randint(1, 2)]
    if math.prod(axes[names.index(n)] for n in taken) > shape[dim]:
        taken = []
    axis = tuple(taken) if len(taken) > 1 else taken[0] if taken else None
    ids = _draw_order(rng, devices) if rng.random() < 0.5 else ()
    return MeshSplit(mesh, ids, _with((None,) * len(shape), dim, axis))


def _draw_grid(rng: random.Random, shape: Shape, devices: int) -> Cut:
    """Draws any way to shard several dimensions, with the mesh axes in any order."""
    if rng.random() < 0.5:
        fits = _assignments(shape, devices)
        if not fits:
            return Replicate()
        grid = rng.choice(fits)
        order = _shuffled(rng, range(len(grid)))
        ids = np.arange(devices).reshape([grid[d] for d in order]).transpose(np.argsort(order))
        return Shard(grid, tuple(ids.flatten().tolist()))
    axes = rng.choice(_factorisations(devices))
    mesh, names = _mesh(axes)
    mapping: list[list[str]] = [[] for _ in shape]
    parts = [1] * len(shape)
    for name, size in _shuffled(rng, zip(names, axes)):
        fits = [d for d, n in enumerate(shape) if len(mapping[d]) < 2 and parts[d] * size <= n]
        dim = rng.choice([*fits, None])
        if dim is not None:
            mapping[dim].append(name)
            parts[dim] *= size
    entries = [None if not m else m[0] if len(m) == 1 else tuple(m) for m in mapping]
    return MeshSplit(mesh, (), tuple(entries))


def _draw_letters(
    rng: random.Random, equation: str, shapes: Sequence[Shape], devices: int
) -> list[Cut]:
    """Draws a mesh axis for some letters; every operand and the result is sharded by its letters."""
    terms = equation.replace("->", ",").split(",")
    axes = rng.choice(_factorisations(devices))
    mesh, names = _mesh(axes)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        letters = term.strip(".")
        sizes |= dict(zip(letters, shape[len(shape) - len(letters) :], strict=True))
    free = _shuffled(rng, sorted(sizes))
    split = {}
    for name, size in zip(names, axes):
        fits = [letter for letter in free if sizes[letter] >= size]
        if fits:
            split[fits[0]] = name
            free.remove(fits[0])
    return [
        MeshSplit(mesh, (), (None,) * dots + sharding.dims_mapping(term.strip("."), split))
        for term in terms
        for dots in [term.startswith(_ELLIPSIS)]
    ]


def _draw_order(rng: random.Random, devices: int) -> tuple[int, ...]:
    return tuple(_shuffled(rng, range(devices)))


def _mesh(axes: Shape) -> tuple[str, str]:
    """Returns the text of a mesh, and its axes' names, a letter each."""
    names = "xyz"[: len(axes)]
    return ",".join(f"{name}:{size}" for name, size in zip(names, axes)), names


def _shuffled(rng: random.Random, values: Iterable[Any]) -> list[Any]:
    values = list(values)
    return rng.sample(values, len(values))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _factorisations(n: int, most: int = 3) -> list[Shape]:
    """Returns all meshes of n devices of up to `most` axes of two devices or more, and the mesh of one device."""
    found = [(n,)]
    if most > 1:
        found += [
            (d, *rest) for d in _divisors(n)[1:-1] for rest in _factorisations(n // d, most - 1)
        ]
    return found


def _assignments(shape: Shape, devices: int) -> list[Shape]:
    """The numbers of parts of each dimension that use every device once and fit."""
    if not shape:
        return [()] if devices == 1 else []
    return [
        (n, *rest)
        for n in _divisors(devices)
        if n <= shape[0]
        for rest in _assignments(shape[1:], devices // n)
    ]
