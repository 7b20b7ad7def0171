"""An operation, forward and backward, under every pair of shardings of an operand and of its result.

The result's cotangent is sharded like the result, and the operand's gradient like the operand. All pairs are parts of
one program, which takes a second or two:

    check_pairs(lambda x: x[::3], [floats(12, 8)])
"""

import itertools
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import assert_close, floats

from lingvo_moe.core.engine.partition_dump import dump_options, read_before
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.engine.specs import TensorSpec
from lingvo_moe.core.engine.testing import run_single
from lingvo_moe.core.hlo.module import parse_module
from lingvo_moe.core.partitioner.known_faults import OFF, known_faults
from lingvo_moe.core.sharding import DimsMapping, Mesh, mesh_split

MESH = Mesh.parse("a:2,b:2")
_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
Pair = tuple[DimsMapping, DimsMapping]


def shardings(shape: Sequence[int]) -> list[DimsMapping]:
    """Every mapping of a tensor to the axes of the mesh that leaves no part of a dimension empty by itself."""
    found = []
    for mapping in itertools.product(
        [(), ("a",), ("b",), ("a", "b"), ("b", "a")], repeat=len(shape)
    ):
        used = [axis for axes in mapping for axis in axes]
        if len(set(used)) == len(used) and all(2 ** len(m) <= n for m, n in zip(mapping, shape)):
            found.append(tuple(axes or None for axes in mapping))
    return found


def check_pairs(fn: Callable[..., Any], args: Sequence[np.ndarray], number: int = 0) -> None:
    """Asserts that results and gradients under each pair are those of one device, or that a known fault is named.

    Args:
        fn: of tensors to one tensor, without annotations.
        args: the first ones; the cotangent is drawn here.
        number: of the argument that is sharded, while the others are replicated.
    """
    result = run_single(fn, args, MESH, jit_compile=False)
    pairs = list(
        itertools.product(
            [s for s in shardings(args[number].shape) if next(filter(None, s), "a")[0] == "a"],
            shardings(result.shape),
        )
    )
    values = [*args, floats(*result.shape, seed=7)]

    def program(*tensors: tf.Tensor) -> list[list[tf.Tensor]]:
        return [_under(pair, i, fn, tensors, number) for i, pair in enumerate(pairs)]

    (want,) = run_single(lambda *t: [_under(pairs[0], 0, fn, t, number)], values, MESH, False)
    got, named = _run(program, values)
    wrong = {i for i, found in enumerate(got) if not _equal(found, want)}
    assert not (wrong ^ named), [(pairs[i], i in wrong) for i in sorted(wrong ^ named)]


def _under(
    pair: Pair, i: int, fn: Callable[..., Any], tensors: Sequence[tf.Tensor], number: int
) -> list[tf.Tensor]:
    """The result, and the gradients by all floating-point arguments.

    Numbers are computed after they were sharded, so that the padding of uneven parts is not zero.
    """
    *args, cotangent = tensors
    with tf.name_scope(f"pair_{i}_"), tf.GradientTape() as tape:
        tape.watch([a for a in args if a.dtype.is_floating])
        given = list(args)
        given[number] = _dirty(mesh_split(args[number], MESH, pair[0]))
        y = mesh_split(fn(*given), MESH, pair[1])
    if not y.dtype.is_floating:
        return [y]
    by = [a for a in args if a.dtype.is_floating]
    sent = _dirty(mesh_split(cotangent, MESH, pair[1]))
    found = tape.gradient(y, by, sent, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [y, *map(tf.convert_to_tensor, found)]


def _dirty(x: tf.Tensor) -> tf.Tensor:
    return 2.0 * x + 1.0 if x.dtype.is_floating else x


def _run(program: Callable[..., Any], values: Sequence[np.ndarray]) -> tuple[Any, set[int]]:
    """The results of a program, and the numbers of the pairs in which a fault is named."""
    engine = PjrtEngine(MESH, known_faults=OFF)
    specs = [TensorSpec(v.shape, v.dtype.name, ()) for v in values]
    with tempfile.TemporaryDirectory() as directory:
        compiled = engine.Compile(engine.Lower(program, specs), _OPTIONS | dump_options(directory))
        before = read_before(directory)
    faults = known_faults(parse_module(before))
    named = {int(n) for f in faults for n in re.findall(r"pair_(\d+)_", f.op)}
    return engine.Get(compiled(*values)), named


def _equal(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> bool:
    try:
        assert_close("", got, want, 1e-5)
    except AssertionError:
        return False
    return True
