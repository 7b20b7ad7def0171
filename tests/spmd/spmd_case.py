"""Conformance cases: an annotated function, run on one device and over a mesh, must be the same function.

A case is data, so that one list serves the tests of one process, of several, and the documentation's
count. `check` runs one:

    CASES = [
        Case("contracting", lambda a, b: split(a, 1, 8) @ split(b, 0, 8), (floats(8, 16), floats(16, 4)),
             forward={"all-reduce": 1}),
    ]

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_case(case):
        check(case)
"""

import functools
import itertools
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import numpy as np
import tensorflow as tf
from rows import bound

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.analysis.programs.hlo.collectives import COLLECTIVES
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.core.engine.lowering.embedding import embedded
from lingvo_moe.core.engine.lowering.lowering import exported_bytes
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.signature import Signature
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.engine.lowering.tracing import trace
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.engine.program_analysis import Collective
from lingvo_moe.core.nested_map import skeleton
from lingvo_moe.core.sharding import Mesh, annotate, use_mesh
from lingvo_moe.core.task.step import Step

VALUE_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
_TOGETHER = 8  # cases in a program
_SOON = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@dataclass(frozen=True, eq=False)
class Case:
    """One promise about one function.

    Attributes:
        name: unique in its list; a slug.
        fn: TensorFlow, of tensors, annotated; returns a tensor or a tuple of them.
        args: NumPy arrays; see `floats` and `ints`.
        mesh: as `Mesh.parse` reads it.
        splits: for each argument its sharding when the program begins, e.g. ('d', None); None: replicated.
        forward: exactly the collectives of the forward program; None: not checked.
        backward: the same for the program that computes values and gradients.
        gradients: numbers of the arguments to differentiate; None: all floating-point ones.
        whole: results are replicated, and gathering them is not counted. For results that do not divide evenly; the
            partitioner chooses the sharding of others.
        reference: runs on one device instead of `fn`, if TensorFlow cannot run `fn`.
        jit_reference: XLA compiles the reference too, for operations without a kernel of TensorFlow's.
        inspect: further assertions about the forward program's text.
        several_processes: also run over two and four processes.
        gradient_elsewhere: the bound of a gradient's error on processors that round differently (tests/rows.py).
    """

    name: str
    fn: Callable[..., Any]
    args: Sequence[np.ndarray]
    mesh: str = "d:8"
    splits: Sequence[Any] | None = None
    forward: Mapping[str, int] | None = None
    backward: Mapping[str, int] | None = None
    gradients: Sequence[int] | None = None
    whole: bool = False
    reference: Callable[..., Any] | None = None
    jit_reference: bool = False
    inspect: Callable[[str], None] | None = None
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


def moves(*wanted: tuple[Any, ...]) -> Callable[[str], None]:
    """Checks, as a `Case.inspect`, that the collectives are exactly these, in any order.

    Each is (kind, bytes on one device), or (kind, bytes, devices) if it is the only one of its kind; see `devices_of`.
    Those that only bring results into the requested form do not count.
    """

    def inspect(hlo: str) -> None:
        have = sorted((c.kind, c.num_bytes) for c in _inner(hlo))
        assert have == sorted(w[:2] for w in wanted), have
        for kind, _, *devices in wanted:
            assert not devices or devices_of(hlo, kind) == devices, devices_of(hlo, kind)

    return inspect


def check(case: Case, cases: Sequence[Case] = ()) -> None:
    """Asserts the values, gradients and collectives of a case.

    Those of `cases` that have the same mesh share a program with it, since compiling one is what takes time.
    """
    alike = [c for c in cases if (c.mesh, c.whole) == (case.mesh, case.whole)] or [case]
    first = alike.index(case) // _TOGETHER * _TOGETHER
    batch = alike[first : first + _TOGETHER]
    want, got = _compare(tuple(batch))[batch.index(case)]

    assert_close(f"{case.name}: value", got.values, want.values, VALUE_TOLERANCE)
    _assert_cut(case, got.forward)
    if case.forward is not None:
        assert count_inner(got.forward) == dict(case.forward), f"{case.name}: forward"
    if case.inspect is not None:
        case.inspect(got.forward)
    tolerance = bound(GRADIENT_TOLERANCE, case.gradient_elsewhere)
    assert_close(f"{case.name}: gradient", got.gradients, want.gradients, tolerance)
    if want.gradients and case.backward is not None:
        expected = dict(case.backward)
        assert count_inner(got.backward) == expected, f"{case.name}: gradient"


@dataclass(frozen=True)
class _Found:
    """Results of a case, and the parts of the compiled program that compute them, as HLO text."""

    values: Sequence[np.ndarray]
    gradients: Sequence[np.ndarray]
    forward: str = ""
    backward: str = ""


@functools.cache
def _compare(batch: tuple[Case, ...]) -> list[tuple[_Found, _Found]]:
    """Computes each case on one device, and over the mesh in one program of all cases.

    If that program cannot be compiled, each case has one of its own.
    """
    mesh = Mesh.parse(batch[0].mesh)
    wanted = [_on_one_device(case, mesh) for case in batch]
    calls = [call for case, want in zip(batch, wanted) for call in _calls(case, want.values)]
    try:
        results, hlo = _run(calls, mesh, batch[0].whole)
    except Exception:
        if len(batch) == 1:
            raise
        return [_compare((case,))[0] for case in batch]
    of = [(values, _lines(hlo, i)) for i, values in enumerate(results)]
    return [
        (want, _Found(forward, backward, forward_hlo, backward_hlo))
        for want, (forward, forward_hlo), (backward, backward_hlo) in zip(wanted, of[::2], of[1::2])
    ]


@dataclass(frozen=True)
class _Call:
    """A function and its arguments, as one part of a program."""

    fn: Callable[..., Any]
    args: Sequence[np.ndarray]
    splits: Sequence[Any]

    def Specs(self) -> list[TensorSpec]:
        pairs = zip(self.args, self.splits, strict=True)
        return [TensorSpec(a.shape, a.dtype.name, split or ()) for a, split in pairs]


def _calls(case: Case, values: Sequence[np.ndarray]) -> tuple[_Call, _Call]:
    """The case forward, and its gradients, from arguments of their own so that nothing is shared."""
    splits = list(case.splits or [None] * len(case.args))
    sent = _cotangents(case, values)
    if not sent:
        return _Call(case.fn, case.args, splits), _Call(lambda: (), [], [])
    gradients = _gradients(case.fn, case)
    return (
        _Call(case.fn, case.args, splits),
        _Call(gradients, [*case.args, *sent], [*splits, *[None] * len(sent)]),
    )


def _run(calls: Sequence[_Call], mesh: Mesh, whole: bool) -> tuple[list[list[np.ndarray]], str]:
    """The results of all calls in one program, and its HLO text.

    Each call is lowered by itself: equal constants of one function become one tensor, through which shardings would go
    from one case to another.
    """
    kept = None if whole else AUTO
    traced = [
        trace(Step("case", call.fn, call.Specs(), results=kept), mesh) if call.args else None
        for call in calls
    ]

    def program(*values: jax.Array) -> tuple[jax.Array, ...]:
        results, rest = [], list(values)
        for i, found in enumerate(traced):
            if found:
                specs = [tf.TensorSpec(a.shape, a.dtype) for a in found.signature.args]
                with jax.named_scope(f"call_{i}_"):
                    results += embedded(found.function, specs)(*rest[: len(specs)])
                rest = rest[len(specs) :]
        return tuple(results)

    signatures = [found.signature for found in traced if found]
    counts = [len(found.signature.results) if found else 0 for found in traced]
    names = [f"arg{i}" for i in range(sum(len(s.args) for s in signatures))]
    args = [a for s in signatures for a in s.args]
    joined = Signature(
        name="program",
        mesh=mesh,
        args=tuple(replace(a, name=name) for a, name in zip(args, names, strict=True)),
        results=tuple(r for s in signatures for r in s.results),
        arg_structure={"names": names, "trees": [0] * len(names)},
        result_structure={"tuple": False, "tree": skeleton([[None] * n for n in counts])},
        donated=(),
    )
    engine = PjrtEngine(mesh, known_faults="off")
    compiled = engine.Compile(Program(joined, exported_bytes(program, joined)), _SOON)
    results = compiled(*[value for call in calls for value in call.args])
    hlo = _named(
        compiled.HloText(), [i for i, f in enumerate(traced) if f for _ in f.signature.args]
    )
    of_none = [c for c in _inner(hlo) if not re.search(r"\bcall_\d+_/", c.op_name)]
    assert not of_none, of_none
    return engine.Get(results), hlo


def _named(hlo: str, of_arguments: Sequence[int]) -> str:
    """The text, in which a collective that XLA left without a name has that of the call whose tensors it reads.

    `of_arguments` has the number of the call that takes each argument of the program.
    """
    for computation in parse_module(hlo).computations.values():
        names = [i.op_name for i in computation.instructions]
        inside = {n for name in names for n in re.findall(r"\bcall_\d+_/", name)}
        for instruction in computation.instructions:
            if instruction.op_name or instruction.opcode.removesuffix("-start") not in COLLECTIVES:
                continue
            read = instruction
            while not read.op_name and read.operands:
                read = computation.by_name[read.operands[0]]
            owner = re.search(r"\bcall_\d+_/", read.op_name)
            argument = re.search(r"\bargs\[(\d+)\]", read.op_name)
            if owner:
                call = owner[0]
            elif argument:
                call = f"call_{of_arguments[int(argument[1])]}_/"
            else:
                (call,) = inside
            line = re.compile(rf"^(.*%?{re.escape(instruction.name)} = .*)$", re.MULTILINE)
            hlo = line.sub(rf'\1, metadata={{op_name="{call}unnamed"}}', hlo, count=1)
    return hlo


def _lines(hlo: str, number: int) -> str:
    """The lines of a compiled program that come from one call, and its share of sums that XLA joined with others."""
    lines = (_share(line, number) for line in hlo.splitlines() if f"call_{number}_/" in line)
    return "\n".join(lines)


def _share(line: str, number: int) -> str:
    joined = re.search(r'op_name="[^"]*\(([^"()]*)\)"', line)
    if joined is None:
        return line
    types = re.search(r"= \((.*?)\) all-reduce\(", line)
    arrays = re.findall(r"\w+\[[^\]]*\](?:\{[^}]*\})?", types[1])
    mine = [
        array
        for array, name in zip(arrays, joined[1].split(":"), strict=True)
        if f"call_{number}_/" in name
    ]
    return line.replace(types[1], ", ".join(mine), 1).replace(joined[1], f"call_{number}_/", 1)


def _on_one_device(case: Case, mesh: Mesh) -> _Found:
    """The values and gradients that TensorFlow computes alone, without annotations."""
    fn = case.reference or case.fn

    def run(fn: Callable[..., Any], args: Sequence[np.ndarray]) -> list[np.ndarray]:
        fn = tf.function(fn, jit_compile=True, autograph=False) if case.jit_reference else fn
        with use_mesh(mesh), mock.patch.object(annotate, "_apply", lambda _, tensor: tensor):
            return [np.asarray(y) for y in _tuple(fn(*map(tf.constant, args)))]

    values = run(fn, case.args)
    gradients = run(_gradients(fn, case), [*case.args, *_cotangents(case, values)])
    return _Found(values, gradients)


def _cotangents(case: Case, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A tensor for each floating-point result, if there is something to differentiate by."""
    if not _differentiable(case):
        return []
    floating = [np.issubdtype(y.dtype, np.floating) for y in values]
    return [
        floats(*y.shape, seed=7 + i) for i, y in enumerate(itertools.compress(values, floating))
    ]


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


def _assert_cut(case: Case, hlo: str) -> None:
    """Asserts that the program is partitioned: without effective annotations the values would be right too.

    In a partitioned program (forward or backward) arguments are sharded, or a device takes its part of them.
    """
    mesh = Mesh.parse(case.mesh)
    comes_cut = any(
        mesh.axis_size(axis) > 1 for split in case.splits or () for axis in split or () if axis
    )
    takes_part = _inner(hlo) or re.search(r"partition-id|dynamic-slice", hlo)
    is_cut = comes_cut or takes_part or case.backward
    assert is_cut, f"{case.name}: nothing is sharded"
    if not case.whole:
        assert len(_inner(hlo)) == len(parse_collectives(hlo)), f"{case.name}: gathers results"


def count_inner(hlo: str) -> dict[str, int]:
    """Counts collectives by kind, without those that only bring results into the requested form."""
    counts: dict[str, int] = {}
    for collective in _inner(hlo):
        counts[collective.kind] = counts.get(collective.kind, 0) + 1
    return counts


def devices_of(hlo: str, kind: str) -> list[list[Any]]:
    """The replica groups of each collective of a kind, or the sorted (source, target) pairs, in order of appearance."""
    lines = re.findall(rf"^.* {kind}(?:-start)?\(.*$", hlo, re.MULTILINE)
    return [_pairs(line) if kind == "collective-permute" else _groups(line) for line in lines]


def _pairs(line: str) -> list[tuple[int, int]]:
    (pairs,) = re.findall(r"source_target_pairs=\{([^ ]*)\}", line)
    return sorted((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs))


def _groups(line: str) -> list[list[int]]:
    """The replica groups of an instruction, written out, as a transposed iota, or as axes of a mesh."""
    if found := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]*)\}", found[1])]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, sizes, order = ([int(n) for n in (t or "").split(",") if n] for t in found.groups())
        devices = np.arange(math.prod(sizes)).reshape(sizes)
        return devices.transpose(order or None).reshape(shape).tolist()
    found = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    assert found, line
    names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", found[1]))
    along = [names.index(name) for name in re.findall(r"'(\w+)'", found[2])]
    order = [i for i in range(len(names)) if i not in along] + along
    devices = np.arange(math.prod(map(int, sizes))).reshape([int(n) for n in sizes])
    count = math.prod(devices.shape[i] for i in along)
    return devices.transpose(order).reshape(-1, count).tolist()


def largest_array(hlo: str) -> int:
    """Returns the number of elements of the largest array that a device holds in a compiled program."""
    shapes = re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", hlo)
    return max(math.prod(int(n) for n in shape.split(",")) for shape in shapes)


def _inner(hlo: str) -> list[Collective]:
    """The collectives that come from an operation; others bring results into the requested form."""
    return [c for c in parse_collectives(hlo) if not c.op_name.endswith("call_exported")]


def _differentiable(case: Case) -> list[int]:
    if case.gradients is not None:
        return list(case.gradients)
    return [i for i, a in enumerate(case.args) if np.issubdtype(a.dtype, np.floating)]


def _gradients(fn: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """Returns the gradients of sum(fn(args) * cotangents) by the requested arguments, as a function of both."""
    count, wanted = len(case.args), _differentiable(case)

    def gradients(*values: tf.Tensor) -> tuple[tf.Tensor, ...]:
        args, cotangents = values[:count], values[count:]
        if not cotangents:
            return ()
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
