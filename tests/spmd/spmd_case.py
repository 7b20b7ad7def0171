"""Conformance cases: an annotated function, run on one device and over a mesh, must be the same function.

A case is data, so that one list serves the tests of one process, of several, and the documentation's
count. `check` runs one:

    CASES = [
        Case("contracting", lambda a, b: split(a, 1, 8) @ split(b, 0, 8), (floats(8, 16), floats(16, 4)),
             collectives={"all-reduce": 1}),
    ]

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_case(case):
        check(case)
"""

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from rows import bound

from lingvo_moe.core.engine.collectives import Collective, parse_collectives
from lingvo_moe.core.engine.eager.testing import Collectives, run_sharded, run_single
from lingvo_moe.core.engine.lowering.specs import AUTO
from lingvo_moe.core.sharding import Mesh

VALUE_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """One promise about one function.

    Attributes:
        name: unique in its list; a slug.
        fn: TensorFlow, of tensors, annotated; returns a tensor or a tuple of them.
        args: NumPy arrays; see `floats` and `ints`.
        mesh: as `Mesh.parse` reads it.
        splits: for each argument its sharding when the program begins, e.g. ('d', None); None: replicated.
        collectives: exactly the collectives of the forward program; None: not checked.
        gradient_collectives: the same for the program that computes values and gradients.
        gradients: numbers of the arguments to differentiate; None: all floating-point ones.
        whole: results are replicated, and gathering them is not counted. For results that do not divide evenly; the
            partitioner chooses the sharding of others.
        reference: runs on one device instead of `fn`, if TensorFlow cannot run `fn`.
        jit_reference: XLA compiles the reference too, for operations without a kernel of TensorFlow's.
        inspect: further assertions about the forward program (its text, its memory).
        several_processes: also run over two and four processes.
        gradient_elsewhere: the bound of a gradient's error on processors that round differently (tests/rows.py).
    """

    name: str
    fn: Callable[..., Any]
    args: Sequence[np.ndarray]
    mesh: str = "d:8"
    splits: Sequence[Any] | None = None
    collectives: Mapping[str, int] | None = None
    gradient_collectives: Mapping[str, int] | None = None
    gradients: Sequence[int] | None = None
    whole: bool = False
    reference: Callable[..., Any] | None = None
    jit_reference: bool = False
    inspect: Callable[[Collectives], None] | None = None
    several_processes: bool = False
    gradient_elsewhere: float = GRADIENT_TOLERANCE

    def __str__(self) -> str:
        return self.name


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns normal float32 numbers, the same in every call, different for different shapes."""
    key = zlib.crc32(repr((shape, seed)).encode())
    return np.random.RandomState(key).standard_normal(shape).astype(np.float32)


def ints(*shape: int, below: int, seed: int = 0) -> np.ndarray:
    """Returns int32 numbers of 0..below-1, the same in every call."""
    key = zlib.crc32(repr((shape, below, seed)).encode())
    return np.random.RandomState(key).randint(0, below, shape).astype(np.int32)


def moves(*wanted: tuple[str, int]) -> Callable[[Collectives], None]:
    """For `Case.inspect`: the collectives are exactly these (kind, bytes on one device), in any order.

    Those that only bring results into the requested form do not count.
    """

    def inspect(found: Collectives) -> None:
        have = sorted((c.kind, c.num_bytes) for c in _inner(found.hlo))
        assert have == sorted(wanted), have

    return inspect


def check(case: Case) -> None:
    """Asserts the values, gradients and collectives of a case."""
    mesh = Mesh.parse(case.mesh)
    results = None if case.whole else AUTO
    reference = case.reference or case.fn

    want = run_single(reference, case.args, mesh, jit_compile=case.jit_reference)
    got, found = run_sharded(case.fn, case.args, mesh, splits=case.splits, results=results)
    assert_close(f"{case.name}: value", got, want, VALUE_TOLERANCE)
    _assert_cut(case, mesh, found.hlo)
    if case.collectives is not None:
        assert count_inner(found.hlo) == dict(case.collectives), f"{case.name}: forward"
    if case.inspect is not None:
        case.inspect(found)

    wanted = _differentiable(case)
    if not wanted or not any(np.issubdtype(np.asarray(y).dtype, np.floating) for y in _tuple(want)):
        return
    cotangents = [
        floats(*np.shape(y), seed=7 + i)
        for i, y in enumerate(_tuple(want))
        if np.issubdtype(np.asarray(y).dtype, np.floating)
    ]
    args = [*case.args, *cotangents]
    splits = None if case.splits is None else [*case.splits, *[None] * len(cotangents)]
    reference = _gradients(reference, case, wanted)
    want = run_single(reference, args, mesh, jit_compile=case.jit_reference)
    got, found = run_sharded(
        _gradients(case.fn, case, wanted), args, mesh, splits=splits, results=results
    )
    tolerance = bound(GRADIENT_TOLERANCE, case.gradient_elsewhere)
    assert_close(f"{case.name}: gradient", got, want, tolerance)
    if case.gradient_collectives is not None:
        assert count_inner(found.hlo) == dict(case.gradient_collectives), f"{case.name}: gradient"


def assert_close(what: str, got: Any, want: Any, tolerance: float) -> None:
    """Asserts equality up to `tolerance` times the largest expected magnitude; integers exactly."""
    got, want = _tuple(got), _tuple(want)
    assert len(got) == len(want), what
    for i, (g, w) in enumerate(zip(got, want)):
        g, w = np.asarray(g), np.asarray(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype), f"{what}[{i}]"
        assert np.all(np.isfinite(w)), f"{what}[{i}]: the reference is not finite"
        if not np.issubdtype(w.dtype, np.floating):
            assert np.array_equal(g, w), f"{what}[{i}]"
            continue
        scale = max(float(np.max(np.abs(w), initial=0.0)), 1e-3)
        worst = float(np.max(np.abs(g - w), initial=0.0))
        assert worst <= tolerance * scale, f"{what}[{i}]: off by {worst} of {scale}"


def _assert_cut(case: Case, mesh: Mesh, hlo: str) -> None:
    """Asserts that the program is partitioned: without effective annotations the values would be right too.

    In a partitioned program (forward or backward) arguments are sharded, or a device asks for its own number. Only
    where replicated results are requested may any be gathered.
    """
    comes_cut = any(
        mesh.axis_size(axis) > 1 for split in case.splits or () for axis in split or () if axis
    )
    is_cut = comes_cut or "partition-id(" in hlo or case.gradient_collectives
    assert is_cut, f"{case.name}: nothing is sharded"
    if not case.whole:
        assert len(_inner(hlo)) == len(parse_collectives(hlo)), f"{case.name}: gathers results"


def count_inner(hlo: str) -> dict[str, int]:
    """Counts collectives by kind, without those that only bring results into the requested form."""
    counts: dict[str, int] = {}
    for collective in _inner(hlo):
        counts[collective.kind] = counts.get(collective.kind, 0) + 1
    return counts


def permutations(hlo: str) -> list[list[tuple[int, int]]]:
    """The (source, target) pairs of each collective-permute, in order of appearance."""
    return [
        [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs)]
        for pairs in re.findall(
            r" collective-permute(?:-start)?\(.*source_target_pairs=\{([^ ]*)\}", hlo
        )
    ]


def largest_array(hlo: str) -> int:
    """Returns the number of elements of the largest array that a device holds in a compiled program."""
    shapes = re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", hlo)
    return max(math.prod(int(n) for n in shape.split(",")) for shape in shapes)


def _inner(hlo: str) -> list[Collective]:
    return [c for c in parse_collectives(hlo) if not c.op_name.endswith("call_exported")]


def _differentiable(case: Case) -> list[int]:
    if case.gradients is not None:
        return list(case.gradients)
    return [i for i, a in enumerate(case.args) if np.issubdtype(a.dtype, np.floating)]


def _gradients(fn: Callable[..., Any], case: Case, wanted: Sequence[int]) -> Callable[..., Any]:
    """Returns the gradients of sum(fn(args) * cotangents) by the requested arguments, as a function of both."""
    count = len(case.args)

    def gradients(*values: tf.Tensor) -> tuple[tf.Tensor, ...]:
        args, cotangents = values[:count], values[count:]
        with tf.GradientTape() as tape:
            tape.watch([args[i] for i in wanted])
            results = [y for y in _tuple(fn(*args)) if y.dtype.is_floating]
            loss = tf.add_n(
                [tf.reduce_sum(y * u) for y, u in zip(results, cotangents, strict=True)]
            )
        found = tape.gradient(
            loss, [args[i] for i in wanted], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return tuple(tf.convert_to_tensor(g) for g in found)  # that of a gather is IndexedSlices

    return gradients


def _tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
