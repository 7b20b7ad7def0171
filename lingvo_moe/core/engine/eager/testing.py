"""Runs a TensorFlow function on one device and, lowered and partitioned, over a mesh: for tests of layers.

Usage:
    mesh = Mesh.parse("expert:8")
    want = run_single(layer_fprop, [theta, x])
    got, collectives = run_sharded(layer_fprop, [theta, x], mesh, splits=[theta_splits, ("expert",
    None)])
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.engine.pjrt import CompiledProgram, PjrtEngine
from lingvo_moe.core.nested_map import flatten_items, pack, skeleton
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh

# A program that runs once should compile fast: partitioning is the same, but machine code is not optimised.
_SOON = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


class Collectives(Counter[str]):
    """Kind -> number of operations; a kind that does not occur counts 0. `hlo` is the compiled module's text."""

    def __init__(self, compiled: CompiledProgram):
        super().__init__(collective.kind for collective in compiled.Collectives())
        self.hlo, self.memory = compiled.HloText(), compiled.Memory()


def run_sharded(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh,
    splits: Sequence[Any] | None = None,
    results: Any = AUTO,
) -> tuple[Any, Collectives]:
    """Lowers, compiles and runs `fn(*args)` over the first devices of this process.

    Args:
        fn: a TensorFlow function of trees; annotations in it take effect.
        mesh: as many devices as the test wants, at most 8 under tests/conftest.py.
        splits: for each argument None (replicated), or a tree in its structure whose
            leaves are specs with a `.split` (VariableSpecs, TensorSpecs), or, for an argument that
            is one tensor, a tuple such as ('expert', None).
        results: as for `lowering.lower`; by default the partitioner chooses, so that no collective
            only gathers results.
    """
    args = [_to_numpy(arg) for arg in args]
    specs = [
        _specs(arg, split) for arg, split in zip(args, splits or [None] * len(args), strict=True)
    ]
    # Numbers are compared, also those of programs that are known to be wrong.
    engine = PjrtEngine(mesh, known_faults="off")
    compiled = engine.Compile(lower(fn, specs, mesh, results=results), _SOON)
    return _get(engine, compiled(*args)), Collectives(compiled)


def run_single(
    fn: Callable[..., Any], args: Sequence[Any], mesh: Mesh | None = None, jit_compile: bool = True
) -> Any:
    """`fn(*args)` by TensorFlow alone on one device, the reference for run_sharded.

    It is compiled, or with jit_compile=False run operation by operation, which takes less time where each runs once.

    `mesh` is for functions that annotate with numbers of partitions, as `split(t, 0, 8)`: in the graph that is made
    then, TensorFlow ignores them. By default it is that of one device.
    """
    args = [_to_numpy(arg) for arg in args]
    structures = [skeleton(arg) for arg in args]
    flat = [[tf.constant(leaf) for _, leaf in flatten_items(arg)] for arg in args]

    def run(*leaves: Any) -> Any:
        with use_mesh(mesh or single_device()):
            return fn(*[pack(s, values) for s, values in zip(structures, leaves)])

    graph = tf.function(run, jit_compile=jit_compile, autograph=False)
    out = (graph if jit_compile or mesh else run)(*flat)
    return tuple(map(_to_numpy, out)) if isinstance(out, tuple) else _to_numpy(out)


def _to_numpy(tree: Any) -> Any:
    return pack(skeleton(tree), [np.asarray(leaf) for _, leaf in flatten_items(tree)])


def _get(engine: PjrtEngine, out: Any) -> Any:
    return tuple(engine.Get(tree) for tree in out) if isinstance(out, tuple) else engine.Get(out)


def _specs(arg: Any, split: Any) -> Any:
    items = flatten_items(arg)
    if split is None or (isinstance(split, tuple) and isinstance(arg, np.ndarray)):
        return pack(
            skeleton(arg), [TensorSpec(a.shape, a.dtype.name, split or ()) for _, a in items]
        )
    splits = [s.split for _, s in flatten_items(split)]
    leaves = [TensorSpec(a.shape, a.dtype.name, s) for (_, a), s in zip(items, splits, strict=True)]
    return pack(skeleton(arg), leaves)
