"""Compares the search's order of strategies with that of compiled programs, and of times measured here.

    python -m benchmarks.auto_parallel_truth

For each of some small functions, strategies are drawn at random; the found one is among them. Each is compiled, and run
over virtual CPU devices: the function and its gradient, the shortest of some runs. The table gives Spearman's rank
correlations, and by how much the found strategy is worse than the best of those drawn.
"""

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from scipy.stats import spearmanr

from benchmarks.compile_time import host
from lingvo_moe import xla_sharding as xs
from lingvo_moe.analysis.plans.machines.base_machine import Machine
from lingvo_moe.analysis.plans.machines.ring import VIRTUAL_CPU
from lingvo_moe.analysis.plans.network.mesh_machine import CPU
from lingvo_moe.analysis.plans.work.costs import costs
from lingvo_moe.analysis.plans.work.seconds import execution_seconds
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.search.auto_shard import solver
from lingvo_moe.analysis.search.auto_shard.strategy import Strategy
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.engine.devices import request_cpu_devices
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import CompiledProgram, PjrtEngine
from lingvo_moe.core.engine.program_analysis import OFF
from lingvo_moe.core.pages.tables import Table, markdown, words
from lingvo_moe.core.sharding import Mesh
from tools import _cli


class Case(NamedTuple):
    """A function, its arguments, and those by which its gradient is computed."""

    name: str
    fn: Callable[..., Any]
    mesh: Mesh
    specs: Sequence[TensorSpec]
    by: Sequence[int]


def perceptron(x: tf.Tensor, w1: tf.Tensor, w2: tf.Tensor) -> tf.Tensor:
    """Two layers, and a loss."""
    return tf.reduce_sum(tf.square(tf.nn.relu(x @ w1) @ w2))


def head(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A normalization over the batch, and a classifier's loss."""
    mean = tf.reduce_mean(x, 0)
    y = (x - mean) * tf.math.rsqrt(tf.reduce_mean(tf.square(x - mean), 0) + 1e-5)
    return -tf.reduce_sum(tf.nn.log_softmax(y @ w)[:, 0])


def experts(x: tf.Tensor, slots: tf.Tensor, wi: tf.Tensor, wo: tf.Tensor) -> tf.Tensor:
    """Dispatch, two layers of each expert, combination."""
    h = tf.nn.relu(tf.einsum("EGCM,EMH->EGCH", tf.einsum("GSEC,GSM->EGCM", slots, x), wi))
    out = tf.einsum("GSEC,GECM->GSM", slots, tf.einsum("EGCH,EHM->GECM", h, wo))
    return tf.reduce_sum(tf.square(out))


def _spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float32")


# Collectives are the same, and compiling is faster.
_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
_LINE, _GRID = Mesh.parse("device:4"), Mesh.parse("data:2,model:2")
_MANY_ROWS = [_spec(8192, 256), _spec(256, 512), _spec(512, 256)]
_WIDE = [_spec(128, 1024), _spec(1024, 4096), _spec(4096, 1024)]
_EXPERTS = [_spec(8, 64, 128), _spec(8, 64, 8, 16), _spec(8, 128, 512), _spec(8, 512, 128)]
CASES = [
    Case("perceptron, many rows", perceptron, _LINE, _MANY_ROWS, [1, 2]),
    Case("perceptron, wide", perceptron, _LINE, _WIDE, [1, 2]),
    Case("perceptron, many rows", perceptron, _GRID, _MANY_ROWS, [1, 2]),
    Case("perceptron, wide", perceptron, _GRID, _WIDE, [1, 2]),
    Case("batch norm and wide head", head, _LINE, [_spec(256, 512), _spec(512, 16384)], [0, 1]),
    Case("experts", experts, _LINE, _EXPERTS, [0, 2, 3]),
]


def compile_step(
    fn: Callable[..., Any], strategy: Strategy, specs: Sequence[TensorSpec], by: Sequence[int]
) -> CompiledProgram:
    """The program of a function and its gradient, for this process's devices: the value, then the gradients.

    Args:
        fn: of tensors; returns one tensor.
        strategy: for these arguments.
        specs: of the arguments.
        by: the numbers of the arguments whose gradients are computed.
    """
    sharded = xs.auto_shard(fn, strategy.mesh, strategy=strategy, known_faults=OFF)

    def step(*args: tf.Tensor) -> list[tf.Tensor]:
        chosen = [args[i] for i in by]
        with tf.GradientTape() as tape:
            tape.watch(chosen)
            y = sharded(*args)
        return [y, *tape.gradient(y, chosen)]

    args = [
        replace(s, split=t.mapping, name=t.name)
        for s, t in zip(specs, strategy.arguments, strict=True)
    ]
    (result,) = strategy.results
    wanted = [TensorSpec(result.shape, "float32", result.mapping), *(args[i] for i in by)]
    engine = PjrtEngine(strategy.mesh, known_faults=OFF)
    program = lower(step, args, engine.mesh, results=wanted, name="step")
    return engine.Compile(program, _OPTIONS)


def compiled_seconds(text: str, machine: Machine) -> float:
    """Seconds of one device of a machine, by the text of a compiled module."""
    return sum(cost.times * execution_seconds(cost, machine) for cost in costs(parse_module(text)))


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.auto_parallel_truth", __doc__)
    flags.DEFINE_integer("draws", 24, "strategies of each function", checks.SIZE)
    flags.DEFINE_integer("runs", 5, "of each program, of which the shortest counts", checks.SIZE)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("auto_parallel_truth", lambda: _run(args), "interrupted")


def _run(args: Flags) -> int:
    request_cpu_devices(8)
    pairs = "analytic, compiled", "analytic, measured", "compiled, measured"
    heads = words("function", "mesh", "strategies", *pairs, "found, compiled", "found, measured")
    rows = []
    for case in CASES:
        rows.append(_row(case, _costs(case, args.draws, args.runs)))
        print(*rows[-1], sep="; ", file=sys.stderr)  # a run takes minutes, and may be interrupted
    print(markdown(Table(heads, rows)), end="")
    print(f"\nMeasured on {host()}.")
    return 0


def _costs(case: Case, draws: int, runs: int) -> np.ndarray:
    """[strategies, 3]: analytic, compiled and measured seconds. The found strategy is the first."""
    names = list(case.fn.__annotations__)
    sharded = xs.auto_shard(
        case.fn, case.mesh, differentiate=[names[i] for i in case.by], topology=CPU
    )
    search = sharded.Searched(*case.specs)
    choices, edges = search.costs.choices, search.costs.edges
    best = solver.solve(choices, edges, None)
    space = list(itertools.product(*(range(len(c.choices)) for c in choices)))
    rng = np.random.RandomState(0)
    places = sorted(rng.choice(len(space), min(draws, len(space)), replace=False))
    chosen = list(dict.fromkeys([best.chosen, *(space[i] for i in places)]))
    values = [(0.1 * rng.standard_normal(s.shape)).astype(np.float32) for s in case.specs]
    found = []
    for one in chosen:
        solution = solver.cost(choices, edges, one)
        strategy = search.AsStrategy(solution, {})
        compiled = compile_step(case.fn, strategy, case.specs, case.by)
        seconds = compiled_seconds(compiled.HloText(), VIRTUAL_CPU)
        engine = PjrtEngine(case.mesh)
        given = [
            engine.PutLeaf(v, s)
            for v, s in zip(values, compiled.program.signature.args, strict=True)
        ]
        found.append((solution.seconds, seconds, _shortest(compiled, given, runs)))
    return np.array(found)


def _shortest(compiled: Any, args: Sequence[Any], runs: int) -> float:
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        compiled(*args)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _row(case: Case, found: np.ndarray) -> list[str]:
    analytic, compiled, measured = found.T
    pairs = ((analytic, compiled), (analytic, measured), (compiled, measured))
    ranks = [f"{spearmanr(a, b).statistic:.2f}" for a, b in pairs]
    worse = [f"{100 * (x[0] / x.min() - 1):.0f}% worse" for x in (compiled, measured)]
    return [case.name, f"`{case.mesh}`", f"{len(found)}", *ranks, *worse]


if __name__ == "__main__":
    _cli.run(main)
