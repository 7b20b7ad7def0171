"""Operations forward and backward, under every pair of shardings of an operand and of the result.

The result's cotangent is sharded like the result, and the operand's gradient like the operand:

    check_pairs(lambda x: x[::3], floats(12, 8))
"""

import itertools
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import assert_close, floats

from lingvo_moe.core.engine.aot.partition_dump import dump_options, read_before
from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.hlo.module import parse_module
from lingvo_moe.core.partitioner.known_faults import OFF, known_faults
from lingvo_moe.core.sharding import DimsMapping, Mesh, mesh_split

ROW, GRID = Mesh.parse("a:4"), Mesh.parse("a:2,b:2")
_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
_TOLERANCE = 2e-5  # relative to the largest magnitude


def shardings(shape: Sequence[int], mesh: Mesh) -> list[DimsMapping]:
    """Every mapping to the axes of a mesh that shards no dimension into more parts than it has elements."""
    names = mesh.axis_names
    choices = [axes for n in range(len(names) + 1) for axes in itertools.permutations(names, n)]
    found = []
    for mapping in itertools.product(choices, repeat=len(shape)):
        used = [axis for axes in mapping for axis in axes]
        parts = [math.prod(map(mesh.axis_size, axes)) for axes in mapping]
        if len(set(used)) == len(used) and all(n <= size for n, size in zip(parts, shape)):
            found.append(tuple(axes or None for axes in mapping))
    return found


def check_pairs(fn: Callable[..., Any], *args: np.ndarray, mesh: Mesh = ROW) -> None:
    """Asserts that known faults name the pairs whose results or gradients are not those of one device, and no others.

    Args:
        fn: of tensors to one tensor, without annotations.
        args: each is sharded in turn, while the others are replicated.
        mesh: of one axis, or of two that are alike.
    """
    (result,) = run_single(lambda *tensors: [fn(*tensors)], args, mesh, jit_compile=False)
    values = [*args, floats(*result.shape, seed=7)]
    first = mesh.axis_names[0]
    for number, arg in enumerate(args):
        want = None
        for operand in shardings(arg.shape, mesh):
            if next(filter(None, operand), first)[0] == first:  # The other half is alike.
                pairs = _Pairs(fn, number, operand, shardings(result.shape, mesh), mesh)
                want = want or _on_one_device(pairs, values, mesh)
                wrong, named = pairs.Wrong(values, want)
                assert wrong == named, f"argument {number} sharded as {operand}"


class _Pairs:
    """An operation whose operand is sharded in one way and its result in several, each time on its own."""

    def __init__(
        self,
        fn: Callable[..., Any],
        number: int,
        operand: DimsMapping,
        results: Sequence[DimsMapping],
        mesh: Mesh,
    ):
        """Args: `number` is that of the argument which is sharded as `operand`."""
        self._fn, self._number, self._mesh = fn, number, mesh
        self._operand, self._results = operand, results

    def Wrong(
        self, values: Sequence[np.ndarray], want: Sequence[np.ndarray]
    ) -> tuple[list[DimsMapping], list[DimsMapping]]:
        """The shardings of the result with which numbers are wrong, and those with which a fault is named.

        Args:
            values: the arguments and the cotangent.
            want: the result and the gradients of one device.
        """
        engine = PjrtEngine(self._mesh, known_faults=OFF)
        specs = [TensorSpec(v.shape, v.dtype.name, ()) for v in values]
        program = lower(self, specs, self._mesh)
        with tempfile.TemporaryDirectory() as directory:
            compiled = engine.Compile(program, _OPTIONS | dump_options(directory))
            faults = known_faults(parse_module(read_before(directory)))
        named = {int(n) for fault in faults for n in re.findall(r"pair_(\d+)_", fault.op)}
        wrong = {i for i, got in enumerate(engine.Get(compiled(*values))) if not _equal(got, want)}
        return [self._results[i] for i in sorted(wrong)], [self._results[i] for i in sorted(named)]

    def Unsharded(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """The result and the gradients, for a run on one device."""
        return self._Under(0, tensors)

    def __call__(self, *tensors: tf.Tensor) -> list[list[tf.Tensor]]:
        return [self._Under(i, tensors) for i in range(len(self._results))]

    def _Under(self, i: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The result, sharded in the way number i, and the gradients by all floating-point arguments."""
        with tf.name_scope(f"pair_{i}_"):
            *args, cotangent = tensors
            by = [a for a in args if a.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(by)
                args[self._number] = self._Sharded(args[self._number], self._operand)
                y = mesh_split(self._fn(*args), self._mesh, self._results[i])
            if not by or not y.dtype.is_floating:
                return [y]
            sent = self._Sharded(cotangent, self._results[i])
            found = tape.gradient(y, by, sent, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return [y, *map(tf.convert_to_tensor, found)]

    def _Sharded(self, x: tf.Tensor, mapping: DimsMapping) -> tf.Tensor:
        """A sharded tensor, computed after it was sharded: so the padding of uneven parts is not zero."""
        x = mesh_split(x, self._mesh, mapping)
        return 2.0 * x + 1.0 if x.dtype.is_floating else x


def _on_one_device(pairs: _Pairs, values: Sequence[np.ndarray], mesh: Mesh) -> list[np.ndarray]:
    """The result and the gradients by TensorFlow's kernels; by XLA where TensorFlow has none, as for the gradients of
    dilated convolutions on some processors."""
    try:
        return run_single(pairs.Unsharded, values, mesh, jit_compile=False)
    except tf.errors.InvalidArgumentError:
        return run_single(pairs.Unsharded, values, mesh)


def _equal(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> bool:
    try:
        assert_close("", got, want, _TOLERANCE)
    except AssertionError:
        return False
    return True
