"""Random annotated chains of the operations that move, choose and join elements.

A chain begins with one tensor, and each of its steps is an operation of OPERATIONS. Like a RandomProgram it is data,
its repr is Python, and it computes its value and the gradients of its floating-point arguments.
"""

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from random_programs import MESHES, Axis, mapping_of, mesh_axes, value_and_gradients

from lingvo_moe import xla_sharding as xs
from lingvo_moe.core.sharding import Mesh

Shape = Sequence[int]
Cut = tuple[Axis, ...] | None  # The mesh axes of a tensor's dimensions; None: left to XLA.
Setting = int | str | bool | tuple[int, ...]
Operand = tuple[
    tuple[int, ...], int
]  # Shape, and for indices the number that they are below; for others 0.


@dataclass(frozen=True)
class Operation:
    """A row of OPERATIONS.

    Attributes:
        draw: of a random.Random and a shape; settings that fit this shape, or None where none do.
        fn: of the tensor, the operands and the settings.
        operands: of the shape and the settings; the further arguments.
    """

    draw: Callable[[random.Random, Shape], tuple[Setting, ...] | None]
    fn: Callable[..., tf.Tensor]
    operands: Callable[..., list[Operand]] = lambda shape, *settings: []


@dataclass(frozen=True)
class Step:
    """An operation of a chain, with the shardings of its result and of its operands."""

    op: str
    settings: tuple[Setting, ...] = ()
    cut: Cut = None
    operands: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class RandomChain:
    """One annotated chain.

    Attributes:
        mesh: as `Mesh.parse` reads it.
        shape: of the first tensor.
        cut: its mesh axes.
        steps: the operations.
        is_searched: `xs.auto_shard` shards what has no annotation.
    """

    mesh: str
    shape: tuple[int, ...]
    cut: Cut
    steps: tuple[Step, ...]
    is_searched: bool = False

    def Operands(self) -> list[tuple[Operand, ...]]:
        """The operands of each step."""
        shape, found = self.shape, []
        for step in self.steps:
            found.append(tuple(OPERATIONS[step.op].operands(shape, *step.settings)))
            shape = _shape_after(step.op, shape, step.settings)
        return found

    def Args(self) -> list[np.ndarray]:
        """Returns the arguments, the same in every call."""
        rng = np.random.RandomState(7)
        args = [(self.shape, 0), *(operand for found in self.Operands() for operand in found)]
        return [
            rng.randint(0, below, shape).astype(np.int32)
            if below
            else rng.standard_normal(shape).astype(np.float32)
            for shape, below in args
        ]

    def Value(self, *args: tf.Tensor, annotated: bool = True) -> tf.Tensor:
        """The end of the chain."""
        mesh, (x, *rest) = Mesh.parse(self.mesh), args

        def at(tensor: tf.Tensor, cut: Cut) -> tf.Tensor:
            return tensor if cut is None or not annotated else xs.mesh_split(tensor, mesh, cut)

        x = at(x, self.cut)
        for step in self.steps:
            operands = [at(rest.pop(0), cut) for cut in step.operands]
            x = at(OPERATIONS[step.op].fn(x, *operands, *step.settings), step.cut)
        return x

    def __call__(self, *args: tf.Tensor, annotated: bool = True) -> list[tf.Tensor]:
        """The value's sine, and the gradients of a weighted sum of it by all floating-point arguments."""
        return self.Differentiated(lambda *xs: self.Value(*xs, annotated=annotated), args)

    def Differentiated(self, value: Callable[..., tf.Tensor], args: Sequence[tf.Tensor]):
        """The sine of a function's value, and its gradients, which the sine makes depend on the arguments."""
        return value_and_gradients(lambda *xs: tf.sin(value(*xs)), args, self._Learnt())

    def ResultNames(self) -> list[str]:
        return ["value", *(f"gradient of argument {i}" for i in self._Learnt())]

    def _Learnt(self) -> list[int]:
        operands = [below for found in self.Operands() for _, below in found]
        return [i for i, below in enumerate([0, *operands]) if not below]


@functools.lru_cache
def _shape_after(op: str, shape: Shape, settings: Sequence[Setting]) -> tuple[int, ...]:
    operation = OPERATIONS[op]
    with tf.Graph().as_default():
        x = tf.zeros(shape)
        rest = [
            tf.zeros(s, tf.int32 if below else tf.float32)
            for s, below in operation.operands(shape, *settings)
        ]
        return tuple(operation.fn(x, *rest, *settings).shape)


def _dim(rng: random.Random, shape: Shape, *, least: int = 1) -> int:
    """A dimension of at least `least` elements; -1 where there is none."""
    return rng.choice([d for d, size in enumerate(shape) if size >= least] or [-1])


def _with_dim(*settings: Callable[[random.Random, int], Setting], least: int = 1, rank: int = 1):
    """Draws a dimension, then each of `settings` of its size."""

    def draw(rng: random.Random, shape: Shape) -> tuple[Setting, ...] | None:
        dim = _dim(rng, shape, least=least)
        if dim < 0 or len(shape) < rank:
            return None
        return (dim, *(setting(rng, shape[dim]) for setting in settings))

    return draw


def _one_of(*values: Setting) -> Callable[[random.Random, int], Setting]:
    return lambda rng, size: rng.choice(values)


def _up_to(most: Callable[[int], int]) -> Callable[[random.Random, int], Setting]:
    return lambda rng, size: rng.randint(0, most(size))


def _slice_of(rng: random.Random, size: int) -> tuple[int, ...]:
    """(first element, how many, step)."""
    step = rng.choice((1, 2, 3, -1, -2, -3))
    count = rng.randint(1, -(-size // abs(step)))
    first = rng.randint(0, size - 1 - (count - 1) * abs(step))
    return (first if step > 0 else first + (count - 1) * abs(step), count, step)


def _slice(x: tf.Tensor, dim: int, bounds: tuple[int, int, int]) -> tf.Tensor:
    first, count, step = bounds
    stop = first + count * step
    return x[(slice(None),) * dim + (slice(first, stop if stop >= 0 else None, step),)]


def _neighbours(rng: random.Random, shape: Shape) -> tuple[Setting, ...] | None:
    return (rng.randrange(len(shape) - 1),) if len(shape) > 1 else None


def _reshape(x: tf.Tensor, dim: int, count: int, sizes: Shape) -> tf.Tensor:
    """Replaces `count` dimensions from `dim` on."""
    shape = list(x.shape)
    return tf.reshape(x, [*shape[:dim], *sizes, *shape[dim + count :]])


def _divisors(rng: random.Random, size: int) -> Setting:
    return rng.choice([n for n in range(1, size + 1) if size % n == 0])


def _realign(x: tf.Tensor, dim: int, share: int) -> tf.Tensor:
    """Reshapes two neighbouring dimensions into two others."""
    size = x.shape[dim] * x.shape[dim + 1]
    outer = [n for n in range(1, size + 1) if size % n == 0]
    outer = outer[share % len(outer)]
    return _reshape(x, dim, 2, (outer, size // outer))


def _apart(x: tf.Tensor) -> tf.Tensor:
    """Moves the elements apart, since equal ones have no gradient by which to choose among them."""
    return x + tf.reshape(tf.cos(tf.cast(tf.range(math.prod(x.shape)), x.dtype)), x.shape)


def _at_dim(shape: Shape, dim: int, *sizes: int) -> tuple[int, ...]:
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def _whole(shape: Shape, *_: Setting) -> list[Operand]:
    return [(tuple(shape), 0)]


def _concat(x: tf.Tensor, y: tf.Tensor, dim: int, _: int, is_first: bool) -> tf.Tensor:
    return tf.concat([y, x] if is_first else [x, y], dim)


_YES_NO = _one_of(False, True)
_SIZE = _one_of(*range(1, 13))
_ANY = _with_dim()


def _no_settings(rng: random.Random, shape: Shape) -> tuple[Setting, ...]:
    return ()


OPERATIONS: dict[str, Operation] = {
    "slice": Operation(_with_dim(_slice_of), _slice),
    "reverse": Operation(_ANY, lambda x, dim: tf.reverse(x, [dim])),
    "roll": Operation(_with_dim(_up_to(lambda n: n)), lambda x, dim, by: tf.roll(x, by, dim)),
    "tile": Operation(_with_dim(_one_of(2, 3)),
        lambda x, dim, times: tf.tile(x, [times if d == dim else 1 for d in range(len(x.shape))])),
    "pad": Operation(
        _with_dim(_up_to(lambda n: n - 1), _up_to(lambda n: n - 1), _one_of("CONSTANT", "REFLECT")),
        lambda x, dim, low, high, mode: tf.pad(
            x, [(low, high) if d == dim else (0, 0) for d in range(len(x.shape))], mode
        ),
    ),
    "concat": Operation(_with_dim(_SIZE, _YES_NO), _concat,
        lambda shape, dim, size, _: [(_at_dim(shape, dim, size), 0)]),
    "stack": Operation(_ANY, lambda x, y, dim: tf.stack([x, y], dim), _whole),
    "merge": Operation(_neighbours, lambda x, dim: _reshape(x, dim, 2, (x.shape[dim] * x.shape[dim + 1],))),
    "split": Operation(_with_dim(_divisors), lambda x, dim, outer: _reshape(x, dim, 1, (outer, x.shape[dim] // outer))),
    "realign": Operation(lambda rng, shape: (*_neighbours(rng, shape), rng.randrange(99)) if shape[1:] else None,
        _realign),
    "transpose": Operation(lambda rng, shape: (tuple(rng.sample(range(len(shape)), len(shape))),), tf.transpose),
    "gather": Operation(_with_dim(lambda rng, n: rng.choice(((6,), (8,), (9,), (4, 4), (3, 2)))),
        lambda x, ids, dim, _: tf.gather(x, ids, axis=dim), lambda shape, dim, many: [(many, shape[dim])]),
    "gather in batches": Operation(_with_dim(_SIZE, rank=2), lambda x, ids, *_: tf.gather(x, ids, batch_dims=1),
        lambda shape, _, many: [((shape[0], many), shape[1])]),
    "gather_nd": Operation(_with_dim(_SIZE, rank=2), lambda x, ids, *_: tf.gather_nd(x, ids),
        lambda shape, _, many: [((many, 2), min(shape[:2]))]),
    "scatter": Operation(_with_dim(_SIZE), lambda x, ids, updates, *_: tf.tensor_scatter_nd_add(x, ids, updates),
        lambda shape, _, many: [((many, 1), shape[0]), (_at_dim(shape, 0, many), 0)]),
    "segments": Operation(_with_dim(_SIZE), lambda x, ids, _, many: tf.math.unsorted_segment_sum(x, ids, many),
        lambda shape, _, many: [((shape[0],), many)]),
    "one-hot": Operation(
        _with_dim(_SIZE),
        lambda x, ids, dim, _: tf.tensordot(
            tf.one_hot(ids, x.shape[dim], dtype=x.dtype), x, [[1], [dim]]
        ),
        lambda shape, dim, many: [((many,), shape[dim])],
    ),
    "one-hot mask": Operation(_no_settings, lambda x, ids: x * (tf.one_hot(ids, x.shape[-1], dtype=x.dtype) + 0.5),
        lambda shape: [(tuple(shape[:-1]), shape[-1])]),
    "where": Operation(_no_settings, lambda x, y: tf.where(y > 0.2, x, y), _whole),
    "cumsum": Operation(_with_dim(_YES_NO, _YES_NO),
        lambda x, dim, exclusive, reverse: tf.cumsum(x, dim, exclusive, reverse) / 4),
    "sort": Operation(_with_dim(_one_of("ASCENDING", "DESCENDING")),
        lambda x, dim, direction: tf.sort(_apart(x), dim, direction)),
    "top_k": Operation(lambda rng, shape: (rng.randint(1, shape[-1]),),
        lambda x, k: tf.math.top_k(_apart(x), k).values),
    "max": Operation(_with_dim(rank=2), lambda x, dim: tf.reduce_max(_apart(x), dim)),
    "sum": Operation(_with_dim(rank=2), lambda x, dim: tf.reduce_sum(x, dim) / 4),
    "softmax": Operation(_ANY, lambda x, dim: tf.nn.softmax(x, dim) * 4),
    "tanh": Operation(_no_settings, tf.tanh),
    "add": Operation(_no_settings, lambda x, y: x + y, lambda shape: [(tuple(shape[-1:]), 0)]),
    "product": Operation(_with_dim(_SIZE), lambda x, w, dim, _: tf.tensordot(x, w, [[dim], [0]]) / 4,
        lambda shape, dim, many: [((shape[dim], many), 0)]),
}  # fmt: skip
_SIZES = (5, 6, 7, 8, 9, 10, 12, 15, 16, 16, 18, 24)
_LARGEST = 8192  # elements
_MOST_DIMS = 4


def random_chain(seed: int) -> RandomChain:
    """Returns the chain of a seed."""
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    share = rng.choice((0.6, 1.0))
    axes = [(name, size) for name, size in mesh_axes(mesh) if size > 1]

    def cut(shape: Shape) -> Cut:
        if rng.random() > share or not shape:
            return None
        sizes = {str(d): size for d, size in enumerate(shape)}
        for _ in range(3):
            found = mapping_of(rng, "".join(sizes), axes, sizes)
            if found:
                break
        return tuple(found.get(d) for d in sizes)

    is_searched = rng.random() < 0.1
    first = tuple(rng.choice(_SIZES) for _ in range(rng.choice((1, 2, 2, 3))))
    of_first, shape, steps = cut(first), first, []
    share *= 0.3 if is_searched else 1.0  # The search decides about the rest.
    for _ in range(rng.choice((1, 2, 3, 4, 5))):
        op = rng.choice(list(OPERATIONS))
        settings = OPERATIONS[op].draw(rng, shape)
        if settings is None:
            continue
        after = _shape_after(op, shape, settings)
        if math.prod(after) > _LARGEST or len(after) > _MOST_DIMS:
            continue
        operands = OPERATIONS[op].operands(shape, *settings)
        steps.append(Step(op, settings, cut(after), tuple(cut(s) for s, _ in operands)))
        shape = after
    return RandomChain(mesh, first, of_first, tuple(steps), is_searched)
