"""Operations forward and backward, under every pair of shardings of an operand and of the result.

The result's cotangent is sharded like the result, and the operand's gradient like the operand:

    check_pairs(lambda x: x[::3], floats(12, 8))
"""

import functools
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from spmd_case import assert_close, floats

from lingvo_moe.analysis.programs.aot.partition_dump import dump_options, read_before
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.partitioner.known_faults import known_faults
from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.engine.program_analysis import OFF
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


def check_pairs(
    fn: Callable[..., Any],
    *args: np.ndarray,
    mesh: Mesh = ROW,
    reference: Callable[..., Any] | None = None,
) -> None:
    """Asserts that known faults name the pairs whose results or gradients are not those of one device, and no others.

    Args:
        fn: of tensors to one tensor, without annotations.
        args: each is sharded in turn, while the others are replicated.
        mesh: of one axis, or of two that are alike.
        reference: what computes the same on one device, where TensorFlow's kernels refuse to compute `fn`.
    """
    reference = reference or fn
    (result,) = run_single(lambda *tensors: [reference(*tensors)], args, mesh, jit_compile=False)
    values = [*args, floats(*result.shape, seed=7)]
    differentiated = _Differentiated(fn, values)
    expected = _Differentiated(reference, values)
    first = mesh.axis_names[0]
    for number, arg in enumerate(args):
        of_argument = functools.partial(_Pair, differentiated, mesh, number)
        want = None
        for operand in shardings(arg.shape, mesh):
            if next(filter(None, operand), first)[0] == first:  # The other half is alike.
                # Of one sharding of the operand alone: others in its program would change what XLA does.
                pairs = [of_argument(operand, r) for r in shardings(result.shape, mesh)]
                alone = replace(pairs[0], differentiated=expected.fn)
                want = want or _on_one_device(alone, values, mesh)
                wrong, named = _wrong_and_named(pairs, values, want)
                assert wrong == named, f"argument {number} sharded as {operand}"


@dataclass(frozen=True)
class _Pair:
    """An operation of which one argument and the result are sharded.

    Attributes:
        differentiated: gives the result and the gradients, without annotations; traced once for all pairs.
        number: of the argument that is sharded, as `operand`.
        result: the sharding of the result and of its cotangent.
    """

    differentiated: Callable[..., list[tf.Tensor]]
    mesh: Mesh
    number: int
    operand: DimsMapping
    result: DimsMapping

    def __call__(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """The result, and the gradients by all floating-point arguments."""
        *args, cotangent = tensors
        floating = [i for i, a in enumerate(args) if a.dtype.is_floating]
        args[self.number] = self._Sharded(args[self.number], self.operand)
        # An annotation holds for the gradient too.
        sent = mesh_split(self._Sharded(cotangent, self.result), self.mesh, self.result)
        y, *gradients = self.differentiated(*args, sent)
        if gradients and self.number in floating:
            at = floating.index(self.number)
            gradients[at] = mesh_split(2.0 * gradients[at], self.mesh, self.operand)
        return [mesh_split(y, self.mesh, self.result), *gradients]

    def _Sharded(self, x: tf.Tensor, mapping: DimsMapping) -> tf.Tensor:
        """A sharded tensor, computed after it was sharded: so the padding of uneven parts is not zero."""
        x = mesh_split(x, self.mesh, mapping)
        return 2.0 * x + 1.0 if x.dtype.is_floating else x


class _Differentiated:
    """A function's result, and its gradients by all floating-point arguments, by a cotangent that comes last.

    Attributes:
        fn: that function itself.

    It is traced once; each call copies the operations into the graph that is being built, with names of their own.
    Loops and branches are traced each time, as the checks of a program read their bodies.
    """

    def __init__(self, fn: Callable[..., Any], values: Sequence[np.ndarray]):
        def differentiated(*tensors: tf.Tensor) -> list[tf.Tensor]:
            *args, sent = tensors
            by = [a for a in args if a.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(by)
                y = fn(*args)
            if not by or not y.dtype.is_floating:
                return [y]
            zero = tf.UnconnectedGradients.ZERO
            found = tape.gradient(y, by, sent, unconnected_gradients=zero)
            return [y, *map(tf.convert_to_tensor, found)]

        specs = [tf.TensorSpec(v.shape, v.dtype) for v in values]
        # TensorFlow takes some gradients in another way for XLA.
        compiled = tf.function(differentiated, jit_compile=True, autograph=False)
        traced = compiled.get_concrete_function(*specs)
        self.fn, self._graph = differentiated, traced.graph.as_graph_def()
        placeholders = {n.name for n in self._graph.node if n.op == "Placeholder"}
        nodes = [n for n in self._graph.node if n.name not in placeholders]
        for node in nodes:
            node.input[:] = [x for x in node.input if x[1:] not in placeholders or x[0] != "^"]
            node.attr.pop("_class", None)  # beside which operation it is placed
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        self._args = [x.name if x.consumers() else "" for x in traced.inputs]
        self._results = [x.name for x in traced.outputs]
        self._shapes = [x.shape for x in traced.outputs]

    def __call__(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        if self._graph.library.function:
            return self.fn(*tensors)
        given = {name: x for name, x in zip(self._args, tensors, strict=True) if name}
        found = tf.graph_util.import_graph_def(self._graph, given, self._results, name="op")
        for x, shape in zip(found, self._shapes, strict=True):
            x.set_shape(shape)
        return found


def _wrong_and_named(
    pairs: Sequence[_Pair], values: Sequence[np.ndarray], want: Sequence[np.ndarray]
) -> tuple[list[DimsMapping], list[DimsMapping]]:
    """The shardings of the result with which numbers are wrong, and those with which a fault is named.

    Args:
        pairs: differ in the sharding of the result.
        values: the arguments and the cotangent.
        want: the result and the gradients of one device.
    """

    def program(*tensors: tf.Tensor) -> list[list[tf.Tensor]]:
        found = []
        for i, pair in enumerate(pairs):
            with tf.name_scope(f"pair_{i}_"):
                found.append(pair(*tensors))
        return found

    mesh = pairs[0].mesh
    engine = PjrtEngine(mesh, known_faults=OFF)
    lowered = lower(program, [TensorSpec(v.shape, v.dtype.name, ()) for v in values], mesh)
    with tempfile.TemporaryDirectory() as directory:
        compiled = engine.Compile(lowered, _OPTIONS | dump_options(directory))
        faults = known_faults(parse_module(read_before(directory)))
    wrong = {i for i, got in enumerate(engine.Get(compiled(*values))) if not _equal(got, want)}
    named = {
        int(n)
        for fault in faults
        if wrong or not fault.is_conditional  # from a start in range every pair is right
        for n in re.findall(r"pair_(\d+)_", fault.op)
    }
    return [pairs[i].result for i in sorted(wrong)], [pairs[i].result for i in sorted(named)]


def _on_one_device(
    fn: Callable[..., list[tf.Tensor]], values: Sequence[np.ndarray], mesh: Mesh
) -> Sequence[np.ndarray]:
    """The result and the gradients by TensorFlow's kernels; by XLA where TensorFlow has none, as for the gradients of
    dilated convolutions on some processors."""
    try:
        return run_single(fn, values, mesh, jit_compile=False)
    except tf.errors.InvalidArgumentError:
        return run_single(fn, values, mesh)


def _equal(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> bool:
    try:
        assert_close("", got, want, _TOLERANCE)
    except AssertionError:
        return False
    return True
